/* The sums of runtime/seeds/telemetry.py for a layer's result in host memory, one pass after the other through the
 * cache instead of forty calls of the framework. What each number means stands there.
 *
 * activation(h, rows, stride, features, chunks, columns, width, places, inward, drawn, waiting)
 * gradient(g, rows, stride, features, chunks, columns, width, first)
 * halves(g, rows, stride, features, chunks, waiting, drawn, outward, seen, share, out, among, power)
 *
 * Every array arrives as an address of fp32 (`inward` and `outward` of bfloat16, `among` the lower triangle), rows by
 * columns, `stride` floats from row to row where it is named; sizes are integers; `places` are seven column numbers, eight bits each. The caller vouches for addresses and sizes. Only
 * CPython's limited API is used. The loops run over features, so that they vectorise without reordering a sum.
 */
#define PY_SSIZE_T_CLEAN
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030B0000
#endif
#include <Python.h>

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define WIDE __attribute__((target_clones("avx512f", "arch=haswell", "default")))
#else
#define WIDE
#endif
#if defined(__GNUC__)
#define INLINE inline __attribute__((always_inline))
#else
#define INLINE inline
#endif

#define TINY 1e-12f
#define FEATURES 128 /* features of a chunk whose correlations are looked at */
#define BINS 16
#define SPAN 4.0f
#define MOST 64 /* random directions of one kind */
#define KEPT (1 << 17) /* floats */

typedef struct {
    const float *at;
    int64_t rows, stride, features, chunks;
} rows_t;

/* Memory that the next call finds warm; what is large is not kept. The interpreter's lock is held all the while. */
static float *scratch(int64_t floats) {
    static float *kept = NULL;
    static int64_t size = 0;
    if (floats > size) {
        float *more = realloc(kept, floats * sizeof(float));
        if (!more) return NULL;
        kept = more;
        size = floats;
    } else if (size > KEPT && floats <= KEPT) {
        float *less = realloc(kept, KEPT * sizeof(float));
        kept = less ? less : kept;
        size = less ? KEPT : size;
    }
    return kept;
}

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* First feature of a chunk: the first chunks are one wider when the features do not divide evenly. */
static int64_t first_of(const rows_t *h, int64_t chunk) {
    return chunk * (h->features / h->chunks) + least(chunk, h->features % h->chunks);
}

/* bfloat16 is the upper half of a float. */
WIDE static void widen(const uint16_t *from, int64_t many, float *to) {
    for (int64_t i = 0; i < many; i++) {
        const uint32_t bits = (uint32_t)from[i] << 16;
        memcpy(to + i, &bits, sizeof bits);
    }
}

/* Means and variances per feature; then the standardised activations into `unit`. */
WIDE static void standardise(const rows_t *h, float *mean, float *variance, float *unit) {
    const int64_t n = h->features;
    const float share = 1.0f / (float)h->rows;
    memset(mean, 0, n * sizeof(float));
    memset(variance, 0, n * sizeof(float));
    for (int64_t r = 0; r < h->rows; r++)
        for (int64_t j = 0; j < n; j++) mean[j] += h->at[r * h->stride + j];
    for (int64_t j = 0; j < n; j++) mean[j] /= (float)h->rows; /* exact for what is constant and short */
    for (int64_t r = 0; r < h->rows; r++)
        for (int64_t j = 0; j < n; j++) {
            const float d = h->at[r * h->stride + j] - mean[j];
            unit[r * n + j] = d;
            variance[j] += d * d;
        }
    for (int64_t j = 0; j < n; j++) variance[j] *= share;
    for (int64_t j = 0; j < n; j++) mean[n + j] = 1.0f / sqrtf(variance[j] + TINY);  /* behind the means */
    for (int64_t r = 0; r < h->rows; r++)
        for (int64_t j = 0; j < n; j++) unit[r * n + j] *= mean[n + j];
}

/* out[r, d] = sum over j of a[r, j] b[j, d]: four rows at a time, so that their sums do not wait for each other, and
 * `many` known when this is compiled, so that they stay in registers. */
INLINE static void product_by(const float *a, int64_t rows, int64_t stride, int64_t n, const float *b, const int many,
                              float *out) {
    int64_t r = 0;
    for (; r + 4 <= rows; r += 4) {
        float sum[4][MOST];
        const float *row = a + r * stride;
        for (int d = 0; d < many; d++) sum[0][d] = sum[1][d] = sum[2][d] = sum[3][d] = 0;
        for (int64_t j = 0; j < n; j++)
            for (int d = 0; d < many; d++) {
                const float v = b[j * many + d];
                sum[0][d] += row[j] * v;
                sum[1][d] += row[stride + j] * v;
                sum[2][d] += row[2 * stride + j] * v;
                sum[3][d] += row[3 * stride + j] * v;
            }
        for (int k = 0; k < 4; k++) memcpy(out + (r + k) * many, sum[k], many * sizeof(float));
    }
    for (; r < rows; r++) {
        memset(out + r * many, 0, many * sizeof(float));
        for (int64_t j = 0; j < n; j++)
            for (int d = 0; d < many; d++) out[r * many + d] += a[r * stride + j] * b[j * many + d];
    }
}

WIDE static void product(const float *a, int64_t rows, int64_t stride, int64_t n, const float *b, int64_t many,
                         float *out) {
    if (many == 16)
        product_by(a, rows, stride, n, b, 16, out);
    else if (many == 8)
        product_by(a, rows, stride, n, b, 8, out);
    else if (many == 4)
        product_by(a, rows, stride, n, b, 4, out);
    else
        product_by(a, rows, stride, n, b, (int)many, out);
}

/* Sums of |gram| and gram squared over the pairs of at most FEATURES features, evenly spaced. */
WIDE static void correlations(const float *unit, int64_t rows, int64_t n, int64_t low, int64_t size, float *work,
                              float *absolute, float *square) {
    const int64_t step = (size + FEATURES - 1) / FEATURES, many = (size + step - 1) / step;
    float *part = work, *gram = work + rows * many;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t j = 0; j < many; j++) part[r * many + j] = unit[r * n + low + j * step];
    memset(gram, 0, many * many * sizeof(float));
    for (int64_t r = 0; r + 4 <= rows; r += 4) {  /* four samples for one load and store of the sum */
        const float *p = part + r * many;
        for (int64_t i = 0; i < many; i++) {
            const float a = p[i], b = p[many + i], c = p[2 * many + i], d = p[3 * many + i];
            float *to = gram + i * many;
            for (int64_t j = 0; j < many; j++)
                to[j] += a * p[j] + b * p[many + j] + c * p[2 * many + j] + d * p[3 * many + j];
        }
    }
    for (int64_t r = rows / 4 * 4; r < rows; r++)
        for (int64_t i = 0; i < many; i++)
            for (int64_t j = 0; j < many; j++) gram[i * many + j] += part[r * many + i] * part[r * many + j];
    double one = 0, two = 0;
    const float share = 1.0f / (float)rows;
    for (int64_t i = 0; i < many * many; i++) {
        const float v = gram[i] * share;
        one += fabsf(v);
        two += v * v;
    }
    *absolute = (float)one;
    *square = (float)two;
}

/* Entropy of the histogram of standardised activations, nats. Four tables, so that increments do not wait. */
static float entropy(const float *unit, int64_t rows, int64_t n, int64_t low, int64_t size) {
    int64_t count[4][BINS] = {{0}};
    for (int64_t r = 0; r < rows; r++)
        for (int64_t j = 0; j < size; j++) {
            float cell = (unit[r * n + low + j] + SPAN) * (BINS / (2 * SPAN));
            cell = cell < 0 ? 0 : cell > BINS - 1 ? BINS - 1 : cell;  /* not a number: the last */
            count[j & 3][cell == cell ? (int)cell : BINS - 1]++;
        }
    double sum = 0;
    for (int b = 0; b < BINS; b++) {
        const double share = (double)(count[0][b] + count[1][b] + count[2][b] + count[3][b]) / (double)(rows * size);
        if (share > 0) sum -= share * log(share);
    }
    return (float)sum;
}

/* One row of `columns` per chunk. */
static void chunk_sums(const rows_t *h, int64_t c, const float *mean, const float *variance, const float *unit,
                       float *work, float *columns, int64_t places) {
    const int64_t low = first_of(h, c), size = first_of(h, c + 1) - low;
    const int64_t step = (size + FEATURES - 1) / FEATURES, many = (size + step - 1) / step;
    double middle = 0, spread = 0;
    int64_t dead = 0, alive = 0;
    for (int64_t j = low; j < low + size; j++) {
        middle += mean[j];
        spread += variance[j];
        dead += variance[j] <= TINY;
        alive += (j - low) % step == 0 && variance[j] > TINY;
    }
    float correlation = 0, rank = 1;
    if (size > 1) {
        float absolute, square;
        correlations(unit, h->rows, h->features, low, size, work, &absolute, &square);
        correlation = (absolute - (float)alive) / (float)(many * (many - 1));
        rank = (float)(alive * alive) / (square > 1 ? square : 1.0f) / (float)many;
        if (!(square == square)) correlation = rank = NAN;
    }
    const float sums[7] = {1, (float)(middle / size), (float)(spread / size), (float)dead / (float)size, correlation,
                           entropy(unit, h->rows, h->features, low, size), rank};
    for (int i = 0; i < 7; i++) columns[(places >> (8 * i)) & 255] += sums[i];
}

static int numbers(PyObject *const *args, Py_ssize_t n, int64_t *out) {
    for (Py_ssize_t i = 0; i < n; i++) out[i] = PyLong_AsLongLong(args[i]);
    return !PyErr_Occurred();
}

static PyObject *activation(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    int64_t a[11];
    if (n != 11) return PyErr_Format(PyExc_TypeError, "activation takes 11 integers, not %zd", n);
    if (!numbers(args, n, a)) return NULL;
    const rows_t h = {(const float *)a[0], a[1], a[2], a[3], a[4]};
    const int64_t drawn = a[9];
    if (h.rows < 1 || h.chunks < 1 || h.features < h.chunks || drawn > MOST)
        return PyErr_Format(PyExc_ValueError, "%lld rows of %lld features in %lld chunks", h.rows, h.features, h.chunks);
    float *columns = (float *)a[5], *waiting = (float *)a[10];
    const uint16_t *inward = (const uint16_t *)a[8];
    const int64_t many = least(FEATURES, h.features / h.chunks + 1);
    float *mean = scratch((3 + h.rows) * h.features + (h.rows + many) * many + h.features * drawn);
    if (!mean) return PyErr_NoMemory();
    float *variance = mean + 2 * h.features, *unit = variance + h.features, *work = unit + h.rows * h.features;
    float *in = work + (h.rows + many) * many;
    standardise(&h, mean, variance, unit);
    for (int64_t c = 0; c < h.chunks; c++)
        chunk_sums(&h, c, mean, variance, unit, work, columns + c * a[6], a[7]);
    if (inward) {
        widen(inward, h.features * drawn, in);
        product(unit, h.rows, h.features, h.features, in, drawn, waiting);
    }
    Py_RETURN_NONE;
}

WIDE static double squares(const rows_t *g, int64_t low, int64_t size) {
    double sum = 0;
    for (int64_t r = 0; r < g->rows; r++) {
        float lane[16] = {0};
        const float *row = g->at + r * g->stride + low;
        int64_t j = 0;
        for (; j + 16 <= size; j += 16)
            for (int k = 0; k < 16; k++) lane[k] += row[j + k] * row[j + k];
        for (; j < size; j++) lane[0] += row[j] * row[j];
        for (int k = 0; k < 16; k++) sum += lane[k];
    }
    return sum;
}

static PyObject *gradient(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    int64_t a[8];
    if (n != 8) return PyErr_Format(PyExc_TypeError, "gradient takes 8 integers, not %zd", n);
    if (!numbers(args, n, a)) return NULL;
    const rows_t g = {(const float *)a[0], a[1], a[2], a[3], a[4]};
    for (int64_t c = 0; c < g.chunks; c++) {
        const int64_t low = first_of(&g, c);
        const double square = squares(&g, low, first_of(&g, c + 1) - low);
        float *to = (float *)a[5] + c * a[6] + a[7];
        to[0] += 1;
        to[1] += (float)sqrt(square);
        to[2] += (float)square;
    }
    Py_RETURN_NONE;
}

/* phi becomes the positive part of `waiting` less its mean over rows; among[d, e], e <= d, += mean of
 * phi[r, d] phi[r, e]. */
INLINE static void features_by(const rows_t *g, const float *waiting, const int drawn, float *phi, float *among) {
    float mean[MOST] = {0}, sum[MOST * MOST];
    const int64_t rows = g->rows / 2 * 2;
    for (int64_t r = 0; r < g->rows; r++)
        for (int d = 0; d < drawn; d++) mean[d] += waiting[r * drawn + d] > 0 ? waiting[r * drawn + d] : 0;
    for (int d = 0; d < drawn; d++) mean[d] /= (float)g->rows;
    for (int64_t r = 0; r < g->rows; r++)
        for (int d = 0; d < drawn; d++) {
            const float w = waiting[r * drawn + d];
            phi[r * drawn + d] = (w > 0 ? w : 0) - mean[d];
        }
    memset(sum, 0, drawn * drawn * sizeof(float));
    for (int64_t r = 0; r < rows; r++)
        for (int d = 0; d < drawn; d++)
            for (int e = 0; e < drawn; e++) sum[d * drawn + e] += phi[r * drawn + d] * phi[r * drawn + e];
    for (int d = 0; d < drawn && rows; d++)
        for (int e = 0; e <= d; e++) among[d * (d + 1) / 2 + e] += sum[d * drawn + e] / (float)rows;
}

/* out[half, chunk, d, s] += share * sum over the half's rows of phi[r, d] look[r, s], with look[r, s] = sum over j of
 * g[r, j] outward[j, s]; power[chunk] += mean over rows of look squared, by the size of a sample's own gradient. */
INLINE static void meet_by(const rows_t *g, const float *phi, const int drawn, const float *outward, const int seen,
                           float share, float *look, float *out, float *power) {
    float sum[2][MOST * MOST];
    const int64_t rows = g->rows / 2 * 2;
    const float whole = 0.5f * share * (float)g->rows;  /* rows of the batch that the loss is a mean of */
    for (int64_t c = 0; c < g->chunks; c++) {
        const int64_t low = first_of(g, c);
        product(g->at + low, g->rows, g->stride, first_of(g, c + 1) - low, outward + low * seen, seen, look);
        memset(sum[0], 0, drawn * seen * sizeof(float));
        memset(sum[1], 0, drawn * seen * sizeof(float));
        double square = 0;
        for (int64_t r = 0; r < rows; r++) {
            float own = 0;
            for (int s = 0; s < seen; s++) own += look[r * seen + s] * look[r * seen + s];
            square += own;
            for (int d = 0; d < drawn; d++)
                for (int s = 0; s < seen; s++)
                    sum[r & 1][d * seen + s] += phi[r * drawn + d] * look[r * seen + s];
        }
        if (rows) power[c] += (float)(square / (double)rows * whole * whole);
        for (int half = 0; half < 2; half++)
            for (int i = 0; i < drawn * seen; i++)
                out[(half * g->chunks + c) * drawn * seen + i] += share * sum[half][i];
    }
}

WIDE static void meet(const rows_t *g, const float *waiting, int64_t drawn, const float *outward, int64_t seen,
                      float share, float *work, float *out, float *among, float *power) {
    float *look = work + g->rows * drawn;
    if (drawn == 16 && seen == 4) {
        features_by(g, waiting, 16, work, among);
        meet_by(g, work, 16, outward, 4, share, look, out, power);
    } else {
        features_by(g, waiting, (int)drawn, work, among);
        meet_by(g, work, (int)drawn, outward, (int)seen, share, look, out, power);
    }
}

static PyObject *halves(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    int64_t a[13];
    if (n != 13) return PyErr_Format(PyExc_TypeError, "halves takes 13 arguments, not %zd", n);
    const double share = PyFloat_AsDouble(args[9]);
    if (PyErr_Occurred() || !numbers(args, 9, a) || !numbers(args + 10, 3, a + 10)) return NULL;
    const rows_t g = {(const float *)a[0], a[1], a[2], a[3], a[4]};
    if (a[6] > MOST || a[8] > MOST) return PyErr_Format(PyExc_ValueError, "%lld x %lld directions", a[6], a[8]);
    float *work = scratch(g.rows * (a[6] + a[8]) + g.features * a[8]);
    if (!work) return PyErr_NoMemory();
    float *outward = work + g.rows * (a[6] + a[8]);
    widen((const uint16_t *)a[7], g.features * a[8], outward);
    meet(&g, (const float *)a[5], a[6], outward, a[8], (float)share, work, (float *)a[10],
         (float *)a[11], (float *)a[12]);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"activation", (PyCFunction)(void (*)(void))activation, METH_FASTCALL, "sums over a layer's result"},
    {"gradient", (PyCFunction)(void (*)(void))gradient, METH_FASTCALL, "sums over its gradient"},
    {"halves", (PyCFunction)(void (*)(void))halves, METH_FASTCALL, "how far features predict the gradient"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_health", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__health(void) {
    PyObject *made = PyModule_Create(&module);
    if (made && PyModule_AddIntConstant(made, "ARGUMENTS", 3) < 0) Py_CLEAR(made);  /* counted up when they change */
    return made;
}
