/* The sums of runtime/seeds/telemetry.py for a layer's result in host memory, one pass after the other through the
 * cache instead of forty calls of the framework. What each number means stands there.
 *
 * activation(place, h) -> the features that wait for the gradient, or None
 * backward(place, g, waiting)
 *
 * `place` is a packed `place_t`: what stays the same from one sampled step of a layer to the next. h and g are
 * addresses of its [rows, features]. All arrays are fp32 without gaps (`inward` [features, LANES] and `outward`
 * [seen, features] are bfloat16, `among` is a lower triangle). The caller vouches for addresses and sizes. Only
 * CPython's limited API is used. Sums run over lanes of features, so that they vectorise without being reordered.
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
#define SEEN 4         /* random directions of the gradient, at most */
#define KEPT (1 << 17) /* floats */
#define LANES 16       /* features at a time; random directions of activations */

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef float loose __attribute__((vector_size(4 * LANES), aligned(4), may_alias)); /* in memory */
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));

typedef struct {
    int64_t rows, every, features, chunks; /* one row in `every` is looked at */
    int64_t columns, width, places, first; /* sums of the chunks: address, floats from chunk to chunk, seven column
                                              numbers of eight bits each, first column of the gradient's sums */
    int64_t inward, outward, seen;         /* random directions; `inward` 0 where no gain is predicted */
    int64_t halves, among, power;
} place_t;

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
    const int64_t n = h->features, whole = n / LANES * LANES;
    const float many = (float)h->rows;
    float *root = unit + (h->rows - 1) * n; /* what is written last */
    memset(mean, 0, n * sizeof(float));
    memset(variance, 0, n * sizeof(float));
    for (int64_t r = 0; r < h->rows; r++) {
        const float *row = h->at + r * h->stride;
        for (int64_t j = 0; j < whole; j += LANES) *(loose *)(mean + j) += *(const loose *)(row + j);
        for (int64_t j = whole; j < n; j++) mean[j] += row[j];
    }
    for (int64_t j = 0; j < n; j++) mean[j] /= many; /* exact for what is constant and short */
    for (int64_t r = 0; r < h->rows; r++) {
        const float *row = h->at + r * h->stride;
        for (int64_t j = 0; j < whole; j += LANES) {
            const vec d = *(const loose *)(row + j) - *(const loose *)(mean + j);
            *(loose *)(variance + j) += d * d;
        }
        for (int64_t j = whole; j < n; j++) variance[j] += (row[j] - mean[j]) * (row[j] - mean[j]);
    }
    for (int64_t j = 0; j < n; j++) {
        variance[j] *= 1.0f / many;
        root[j] = 1.0f / sqrtf(variance[j] + TINY);
    }
    for (int64_t r = 0; r < h->rows; r++) {
        const float *row = h->at + r * h->stride;
        float *to = unit + r * n;
        for (int64_t j = 0; j < whole; j += LANES)
            *(loose *)(to + j) = (*(const loose *)(row + j) - *(const loose *)(mean + j)) * *(const loose *)(root + j);
        for (int64_t j = whole; j < n; j++) to[j] = (row[j] - mean[j]) * root[j];
    }
}

/* out[r, d] = sum over j of a[r, j] b[j, d]: four rows at a time, so that their sums do not wait for each other. */
WIDE static void project(const float *a, int64_t rows, int64_t n, const float *b, float *out) {
    int64_t r = 0;
    for (; r + 4 <= rows; r += 4) {
        const float *row = a + r * n;
        vec one = {0}, two = {0}, three = {0}, four = {0};
        for (int64_t j = 0; j < n; j++) {
            const vec v = *(const loose *)(b + j * LANES);
            one += row[j] * v;
            two += row[n + j] * v;
            three += row[2 * n + j] * v;
            four += row[3 * n + j] * v;
        }
        loose *to = (loose *)(out + r * LANES);
        to[0] = one, to[1] = two, to[2] = three, to[3] = four;
    }
    for (; r < rows; r++) {
        vec one = {0};
        for (int64_t j = 0; j < n; j++) one += a[r * n + j] * *(const loose *)(b + j * LANES);
        *(loose *)(out + r * LANES) = one;
    }
}

/* Features between those whose correlations are looked at, and how many these are. */
static int64_t step_of(int64_t size) { return (size + FEATURES - 1) / FEATURES; }
static int64_t looked_at(int64_t size) { return (size + step_of(size) - 1) / step_of(size); }
static int64_t padded(int64_t many) { return (many + LANES - 1) / LANES * LANES; }

/* Row i of a tile of the gram matrix, columns from j on: those below the diagonal stand for two. */
INLINE static void weigh(const vec *tile, int64_t i, int64_t j, float share, vec *one, vec *two) {
    const ivec lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, at = lane + (int32_t)j;
    const vec weight = __builtin_convertvector(-2 * (at < (int32_t)i) - (at == (int32_t)i), vec);
    const vec sum = *tile * share;
    *one += weight * (vec)((ivec)sum & 0x7fffffff);
    *two += weight * sum * sum;
}

/* Sums of |gram| and gram squared over all pairs of the features of `part` [rows, width], width padded with zeros. */
WIDE static void correlations(const float *part, int64_t rows, int64_t width, float *absolute, float *square) {
    const float share = 1.0f / (float)rows;
    vec one = {0}, two = {0};
    for (int64_t i = 0; i < width; i += 4)
        for (int64_t j = 0; j < i + 4; j += LANES) {
            vec a = {0}, b = {0}, c = {0}, d = {0};
            const float *p = part;
            for (int64_t r = 0; r < rows; r++, p += width) {
                const vec v = *(const loose *)(p + j);
                a += p[i] * v;
                b += p[i + 1] * v;
                c += p[i + 2] * v;
                d += p[i + 3] * v;
            }
            weigh(&a, i, j, share, &one, &two);
            weigh(&b, i + 1, j, share, &one, &two);
            weigh(&c, i + 2, j, share, &one, &two);
            weigh(&d, i + 3, j, share, &one, &two);
        }
    double sums[2] = {0, 0};
    for (int k = 0; k < LANES; k++) sums[0] += one[k], sums[1] += two[k];
    *absolute = (float)sums[0];
    *square = (float)sums[1];
}

/* Five edges between bins at a time: how many of `many` values lie at or beyond each, or are not numbers. */
INLINE static void beyond(const float *at, int64_t many, const float *edge, ivec *found) {
    ivec a = {0}, b = {0}, c = {0}, d = {0}, e = {0};
    for (int64_t i = 0; i < many; i += LANES) {
        const vec v = *(const loose *)(at + i) + SPAN;
        a += ~(v < edge[0]);
        b += ~(v < edge[1]);
        c += ~(v < edge[2]);
        d += ~(v < edge[3]);
        e += ~(v < edge[4]);
    }
    found[0] += a, found[1] += b, found[2] += c, found[3] += d, found[4] += e;
}

/* Adds to `count` in which bins values lie: below the first edge the first, not a number the last. */
WIDE static void tally(const float *at, int64_t many, int64_t *count) {
    ivec found[BINS - 1] = {{0}};
    float edge[BINS - 1];
    const int64_t whole = many / LANES * LANES;
    for (int b = 0; b < BINS - 1; b++) edge[b] = (float)(b + 1) * (2 * SPAN / BINS);
    for (int b = 0; b < BINS - 1; b += 5) beyond(at, whole, edge + b, found + b);
    int64_t before = whole;
    for (int b = 0; b < BINS - 1; b++) {
        int64_t here = 0;
        for (int k = 0; k < LANES; k++) here -= found[b][k];
        count[b] += before - here;
        before = here;
    }
    count[BINS - 1] += before;
    for (int64_t i = whole; i < many; i++) {
        int b = 0;
        while (b < BINS - 1 && !(at[i] + SPAN < edge[b])) b++;
        count[b]++;
    }
}

/* Entropy of the histogram of standardised activations, nats. */
static float entropy(const float *unit, int64_t rows, int64_t n, int64_t low, int64_t size) {
    int64_t count[BINS] = {0};
    if (size == n)
        tally(unit, rows * n, count);
    else
        for (int64_t r = 0; r < rows; r++) tally(unit + r * n + low, size, count);
    double sum = 0;
    for (int b = 0; b < BINS; b++) {
        const double share = (double)count[b] / (double)(rows * size);
        if (share > 0) sum -= share * log(share);
    }
    return (float)sum;
}

/* The features of a chunk whose correlations are looked at, side by side. */
static const float *side_by_side(const float *unit, int64_t rows, int64_t n, int64_t low, int64_t size, float *work) {
    const int64_t step = step_of(size), many = looked_at(size), width = padded(many);
    if (size == n && many == n && width == n) return unit;
    memset(work, 0, rows * width * sizeof(float));
    for (int64_t r = 0; r < rows; r++)
        for (int64_t j = 0; j < many; j++) work[r * width + j] = unit[r * n + low + j * step];
    return work;
}

/* One row of `columns` per chunk. */
static void chunk_sums(const rows_t *h, int64_t c, const float *mean, const float *variance, const float *unit,
                       float *work, float *columns, int64_t places) {
    const int64_t low = first_of(h, c), size = first_of(h, c + 1) - low;
    const int64_t step = step_of(size), many = looked_at(size);
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
        const float *part = side_by_side(unit, h->rows, h->features, low, size, work);
        correlations(part, h->rows, padded(many), &absolute, &square);
        correlation = (absolute - (float)alive) / (float)(many * (many - 1));
        rank = (float)(alive * alive) / (square > 1 ? square : 1.0f) / (float)many;
        if (!(square == square)) correlation = rank = NAN;
    }
    const float sums[7] = {1, (float)(middle / size), (float)(spread / size), (float)dead / (float)size, correlation,
                           entropy(unit, h->rows, h->features, low, size), rank};
    for (int i = 0; i < 7; i++) columns[(places >> (8 * i)) & 255] += sums[i];
}

static const place_t *place_of(PyObject *packed, PyObject *address, rows_t *all) {
    char *at;
    Py_ssize_t size;
    if (PyBytes_AsStringAndSize(packed, &at, &size)) return NULL;
    if (size != sizeof(place_t)) return PyErr_Format(PyExc_ValueError, "a place of %zd bytes", size), NULL;
    const place_t *p = (const place_t *)at;
    if (p->rows < 1 || p->every < 1 || p->chunks < 1 || p->features < p->chunks || p->seen > SEEN)
        return PyErr_Format(PyExc_ValueError, "%lld rows of %lld features in %lld chunks", p->rows, p->features,
                            p->chunks), NULL;
    *all = (rows_t){(const float *)PyLong_AsLongLong(address), p->rows, p->features, p->features, p->chunks};
    return PyErr_Occurred() ? NULL : p;
}

/* Those that are looked at. */
static rows_t some_of(const place_t *p, const rows_t *all) {
    return (rows_t){all->at, (p->rows + p->every - 1) / p->every, p->features * p->every, p->features, p->chunks};
}

static PyObject *activation(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    rows_t all;
    if (n != 2) return PyErr_Format(PyExc_TypeError, "activation takes 2 arguments, not %zd", n);
    const place_t *p = place_of(args[0], args[1], &all);
    if (!p) return NULL;
    const rows_t h = some_of(p, &all);
    const int64_t width = padded(least(FEATURES, h.features / h.chunks + 1)), drawn = p->inward ? LANES : 0;
    float *mean = scratch((2 + h.rows) * h.features + h.rows * width + h.features * drawn);
    if (!mean) return PyErr_NoMemory();
    float *variance = mean + h.features, *unit = variance + h.features, *work = unit + h.rows * h.features;
    standardise(&h, mean, variance, unit);
    for (int64_t c = 0; c < h.chunks; c++)
        chunk_sums(&h, c, mean, variance, unit, work, (float *)p->columns + c * p->width, p->places);
    if (!drawn) Py_RETURN_NONE;
    PyObject *waiting = PyByteArray_FromStringAndSize(NULL, h.rows * LANES * sizeof(float));
    if (!waiting) return NULL;
    float *in = work + h.rows * width;
    widen((const uint16_t *)p->inward, h.features * LANES, in);
    project(unit, h.rows, h.features, in, (float *)PyByteArray_AsString(waiting));
    return waiting;
}

INLINE static float added(const vec *sum) {
    float half[8];
    for (int k = 0; k < 8; k++) half[k] = (*sum)[k] + (*sum)[k + 8];
    return (half[0] + half[4]) + (half[1] + half[5]) + ((half[2] + half[6]) + (half[3] + half[7]));
}

WIDE static double squares(const rows_t *g, int64_t low, int64_t size) {
    double sum = 0;
    for (int64_t r = 0; r < g->rows; r++) {
        vec lanes = {0};
        const float *row = g->at + r * g->stride + low;
        int64_t j = 0;
        for (; j + LANES <= size; j += LANES) lanes += *(const loose *)(row + j) * *(const loose *)(row + j);
        float rest = added(&lanes);
        for (; j < size; j++) rest += row[j] * row[j];
        sum += rest;
    }
    return sum;
}

/* Norms of the gradient at the chunks. */
static void norms(const place_t *p, const rows_t *g) {
    for (int64_t c = 0; c < g->chunks; c++) {
        const int64_t low = first_of(g, c);
        const double square = squares(g, low, first_of(g, c + 1) - low);
        float *to = (float *)p->columns + c * p->width + p->first;
        to[0] += 1;
        to[1] += (float)sqrt(square);
        to[2] += (float)square;
    }
}

/* phi becomes the positive part of `waiting` less its mean over rows; among[d, e], e <= d, += mean of
 * phi[r, d] phi[r, e] over the rows of whole pairs. */
WIDE static void correlate(const float *waiting, int64_t rows, int64_t paired, float *phi, float *among) {
    const loose *from = (const loose *)waiting;
    loose *to = (loose *)phi;
    vec mean = {0}, sum[LANES] = {{0}};
    for (int64_t r = 0; r < rows; r++) {
        const vec w = from[r];
        mean += to[r] = (vec)((ivec)w & (w > 0));
    }
    mean /= (float)rows;
    for (int64_t r = 0; r < rows; r++) to[r] -= mean;
    for (int64_t r = 0; r < paired; r++)
        for (int d = 0; d < LANES; d++) sum[d] += phi[r * LANES + d] * to[r];
    for (int d = 0; d < LANES && paired; d++)
        for (int e = 0; e <= d; e++) among[d * (d + 1) / 2 + e] += sum[d][e] / (float)paired;
}

/* look[r, s] = sum over j of g[r, low + j] outward[s, low + j]. */
WIDE static void look_at(const rows_t *g, int64_t low, int64_t size, const float *outward, float *look) {
    for (int64_t r = 0; r < g->rows; r++, look += SEEN) {
        const float *row = g->at + r * g->stride + low, *to = outward + low;
        vec sum[SEEN] = {{0}};
        int64_t j = 0;
        for (; j + LANES <= size; j += LANES)
            for (int s = 0; s < SEEN; s++)
                sum[s] += *(const loose *)(row + j) * *(const loose *)(to + s * g->features + j);
        for (int s = 0; s < SEEN; s++) look[s] = added(&sum[s]);
        for (; j < size; j++)
            for (int s = 0; s < SEEN; s++) look[s] += row[j] * to[s * g->features + j];
    }
}

/* out[half, d, s] += share * sum over the half's rows of phi[r, d] look[r, s], a half `apart` floats from the other;
 * gives the sum of look squared. */
WIDE static double halve(const float *phi, const float *look, int64_t paired, float share, int64_t seen, int64_t apart,
                         float *out) {
    vec sum[2][SEEN] = {{{0}}};
    double square = 0;
    for (int64_t r = 0; r < paired; r += 2) {
        const vec one = *(const loose *)(phi + r * LANES), two = *(const loose *)(phi + (r + 1) * LANES);
        const float *at = look + r * SEEN;
        float own = 0;
        for (int s = 0; s < SEEN; s++) {
            sum[0][s] += at[s] * one;
            sum[1][s] += at[SEEN + s] * two;
            own += at[s] * at[s] + at[SEEN + s] * at[SEEN + s];
        }
        square += own;
    }
    for (int half = 0; half < 2; half++, out += apart)
        for (int d = 0; d < LANES; d++)
            for (int64_t s = 0; s < seen; s++) out[d * seen + s] += share * sum[half][s][d];
    return square;
}

/* How far features predict the gradient: sums of `halves`, `among`, `power` (by the size of a sample's own gradient). */
static void meet(const place_t *p, const rows_t *g, const float *waiting, float *work) {
    const int64_t paired = g->rows / 2 * 2;
    const float whole = (float)p->rows, share = 2 * whole / (float)g->rows; /* the loss is a mean over all rows */
    float *phi = work, *look = phi + g->rows * LANES, *outward = look + g->rows * SEEN;
    memset(outward, 0, g->features * SEEN * sizeof(float)); /* of directions that are not there */
    widen((const uint16_t *)p->outward, g->features * p->seen, outward);
    correlate(waiting, g->rows, paired, phi, (float *)p->among);
    for (int64_t c = 0; c < g->chunks; c++) {
        const int64_t low = first_of(g, c);
        look_at(g, low, first_of(g, c + 1) - low, outward, look);
        const double square = halve(phi, look, paired, share, p->seen, g->chunks * LANES * p->seen,
                                    (float *)p->halves + c * LANES * p->seen);
        if (paired) ((float *)p->power)[c] += (float)(square / (double)paired * whole * whole);
    }
}

static PyObject *backward(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    rows_t all;
    if (n != 3) return PyErr_Format(PyExc_TypeError, "backward takes 3 arguments, not %zd", n);
    const place_t *p = place_of(args[0], args[1], &all);
    if (!p) return NULL;
    const rows_t g = some_of(p, &all);
    norms(p, &all);
    if (args[2] == Py_None || !p->inward) Py_RETURN_NONE;
    if (PyByteArray_Size(args[2]) != (Py_ssize_t)(g.rows * LANES * sizeof(float)))
        return PyErr_Format(PyExc_ValueError, "not the features of %lld rows", g.rows);
    float *work = scratch(g.rows * (LANES + SEEN) + g.features * SEEN);
    if (!work) return PyErr_NoMemory();
    meet(p, &g, (const float *)PyByteArray_AsString(args[2]), work);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"activation", (PyCFunction)(void (*)(void))activation, METH_FASTCALL, "sums over a layer's result"},
    {"backward", (PyCFunction)(void (*)(void))backward, METH_FASTCALL,
     "sums over its gradient, and how far features predict it"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_health", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__health(void) {
    PyObject *made = PyModule_Create(&module);
    if (made && PyModule_AddIntConstant(made, "ARGUMENTS", 4) < 0) Py_CLEAR(made);  /* counted up when they change */
    return made;
}
