/* A plan of kernels bound to sizes: what runtime.layout.lay_out and runtime.dispatch.encode do, from the rows of the
 * sealed form (library.sealed). Whatever is out of the ordinary gives None: Python does it, and names what is wrong.
 *
 * bind(rows, dims: dict, plan: (feeds, saved, backward, own: set), kernels: mapping, driver: (kind, launch, clear))
 *     -> (words: bytes, shapes, slots, fresh: buffer numbers, workspace in bytes, first steps) | None
 *
 * First steps: per buffer that the caller passes, -1 where no step names it.
 * `own`: buffers that are results or are handed on; `kernels[name]`: (function, threads, shared, scratch, kinds). In
 * `fresh` -1 stands for the workspace.
 */
#pragma once
#include <Python.h>

#include <stdlib.h>

#include "_segment.h"

#define ODD (-1)   /* Python does it */
#define ERROR (-2) /* a Python exception is set */
#define MAX_RANK 16
#define WORKSPACE_ALIGN 256

enum { INPUT, SAVED, COTANGENT, OUTPUT, GRADIENT, TEMP, ZEROED };

typedef struct {
    int source, own;
    int64_t slot, offset, bytes, first, last;
} place;

typedef struct {
    int64_t *at;
    size_t size, room;
} words;

typedef struct {
    int64_t feeds, saved, backward, nfresh, workspace, nbuffers, nsteps, nzeros;
    place buffers[MAX_BUFFERS];
    int64_t fresh[MAX_BUFFERS], zeros[3 * MAX_BUFFERS];
    char nullable[2 * MAX_BUFFERS], read[MAX_BUFFERS];
    PyObject *dims, *own, *kernels;
} binding;

static int put(words *w, int64_t value) {
    if (w->size == w->room) {
        size_t room = w->room ? 2 * w->room : 128;
        int64_t *more = realloc(w->at, room * sizeof(int64_t));
        if (!more) return ODD;
        w->at = more;
        w->room = room;
    }
    w->at[w->size++] = value;
    return 0;
}

static PyObject *item(PyObject *list, Py_ssize_t i) { /* borrowed; NULL without an exception */
    return list && PyList_Check(list) && i < PyList_Size(list) ? PyList_GetItem(list, i) : NULL;
}

static int is(PyObject *text, const char *word) {
    return text && PyUnicode_Check(text) && !PyUnicode_CompareWithASCIIString(text, word);
}

static int whole(PyObject *value, int64_t *out) {
    int over = 0;
    if (!value || !PyLong_Check(value)) return ODD;
    *out = PyLong_AsLongLongAndOverflow(value, &over);
    return over || (*out == -1 && PyErr_Occurred()) ? ODD : 0;
}

static int64_t floored(int64_t a, int64_t b) { return a / b - (a % b != 0 && (a < 0) != (b < 0)); }

/* The closed grammar of library.sizes. */
static int size_of(PyObject *size, PyObject *dims, int64_t *out, int depth) {
    int64_t a, b;
    if (!size || depth > 20) return ODD;
    if (PyLong_Check(size)) return whole(size, out);
    if (PyUnicode_Check(size)) return whole(PyDict_GetItemWithError(dims, size), out);
    PyObject *op = item(size, 0);
    if (size_of(item(size, 1), dims, &a, depth + 1) || size_of(item(size, 2), dims, &b, depth + 1)) return ODD;
    if (is(op, "add")) return __builtin_add_overflow(a, b, out) ? ODD : 0;
    if (is(op, "sub")) return __builtin_sub_overflow(a, b, out) ? ODD : 0;
    if (is(op, "mul")) return __builtin_mul_overflow(a, b, out) ? ODD : 0;
    if (is(op, "min") || is(op, "max")) return *out = (a < b) == is(op, "min") ? a : b, 0;
    if (b <= 0 || a == INT64_MIN) return ODD;
    if (is(op, "floordiv")) return *out = floored(a, b), 0;
    if (is(op, "ceildiv")) return *out = -floored(-a, b), 0;
    if (is(op, "mod")) return *out = a - b * floored(a, b), 0;
    return ODD;
}

static int64_t itemsize(PyObject *dtype) {
    static const struct { const char *name; int64_t bytes; } known[] = {
        {"bfloat16", 2}, {"float32", 4}, {"float16", 2}, {"int64", 8}, {"int32", 4},
        {"bool", 1}, {"float64", 8}, {"int16", 2}, {"int8", 1}, {"uint8", 1},
    };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (is(dtype, known[i].name)) return known[i].bytes;
    return 0;
}

static int source_of(PyObject *name) {
    static const char *known[] = {"input", "saved", "cotangent", "output", "gradient", "temp", "zeroed"};
    for (int i = INPUT; i <= ZEROED; i++)
        if (is(name, known[i])) return i;
    return ODD;
}

static int zero(binding *b, int64_t slot, int64_t bytes) {
    int64_t *z = b->zeros + 3 * b->nzeros++;
    z[0] = slot, z[1] = 0, z[2] = bytes;
    return 0;
}

static int64_t allocate(binding *b, int64_t buffer) {
    b->fresh[b->nfresh] = buffer;
    return b->feeds + b->nfresh++;
}

/* Size and shape of a buffer, and its slot unless it lies in the workspace. */
static int place_one(binding *b, PyObject *row, int64_t number, PyObject *shapes) {
    place *p = &b->buffers[number];
    PyObject *shape = item(row, 4), *made, *index = item(row, 2);
    Py_ssize_t rank = shape && PyList_Check(shape) ? PyList_Size(shape) : MAX_RANK + 1;
    int64_t size, at;
    p->slot = -1, p->offset = 0, p->first = p->last = -1;
    p->source = source_of(item(row, 1));
    p->bytes = itemsize(item(row, 3));
    if (p->source < 0 || !p->bytes || rank > MAX_RANK || whole(index, &at)) return ODD;
    if (!(made = PyTuple_New(rank))) return ERROR;
    PyTuple_SetItem(shapes, number, made);
    for (Py_ssize_t i = 0; i < rank; i++) {
        if (size_of(PyList_GetItem(shape, i), b->dims, &size, 0) || size < 0) return ODD;
        if (__builtin_mul_overflow(p->bytes, size, &p->bytes)) return ODD;
        if (!(made = PyLong_FromLongLong(size))) return ERROR;
        PyTuple_SetItem(PyTuple_GetItem(shapes, number), i, made);
    }
    if (p->source <= COTANGENT) {
        int64_t end = p->source == SAVED ? b->saved : b->feeds;
        p->slot = at + (p->source == COTANGENT ? b->saved : 0);
        if (b->backward == (p->source == INPUT) || at < 0 || p->slot >= end) return ODD;
    } else if (p->own || p->source == OUTPUT || p->source == GRADIENT) {
        p->slot = allocate(b, number);
    } else {
        return 0;
    }
    if (!p->bytes)
        b->nullable[p->slot] = 1;
    else if (p->source == ZEROED)
        zero(b, p->slot, p->bytes);
    return 0;
}

/* First and last step that names each buffer. */
static int lives(binding *b, PyObject *steps) {
    for (int64_t s = 0; s < b->nsteps; s++) {
        PyObject *args = item(PyList_GetItem(steps, s), 3);
        if (!args || !is(item(PyList_GetItem(steps, s), 0), "k") || !PyList_Check(args)) return ODD;
        for (Py_ssize_t i = 0; i < PyList_Size(args); i++) {
            int64_t n;
            if (!is(item(PyList_GetItem(args, i), 0), "buffer")) continue;
            if (whole(item(PyList_GetItem(args, i), 1), &n) || n < 0 || n >= b->nbuffers) return ODD;
            if (b->buffers[n].first < 0) b->buffers[n].first = s;
            b->buffers[n].last = s;
        }
    }
    return 0;
}

/* The lowest offset at which `bytes` overlap nothing that lives at the same time: candidates are 0 and the ends, rounded
 * up, of what does; as runtime.layout._first_fit finds it by going through them in order of their offsets. */
static int64_t fit(binding *b, const int64_t *done, int64_t count, const place *p) {
    char taken[MAX_BUFFERS] = {0};
    int64_t offset = 0;
    for (;;) {
        int64_t next = -1;
        for (int64_t i = 0; i < count; i++) {
            const place *o = &b->buffers[done[i]];
            if (taken[i] || !(o->first <= p->last && p->first <= o->last)) continue;
            const place *n = next < 0 ? NULL : &b->buffers[done[next]];
            if (!n || o->offset < n->offset || (o->offset == n->offset && o->bytes < n->bytes)) next = i;
        }
        if (next < 0) return offset;
        const place *o = &b->buffers[done[next]];
        if (offset + p->bytes <= o->offset) return offset;
        int64_t end = (o->offset + o->bytes + WORKSPACE_ALIGN - 1) / WORKSPACE_ALIGN * WORKSPACE_ALIGN;
        if (end > offset) offset = end;
        taken[next] = 1;
    }
}

/* Temporaries share one allocation, those that must be zero first. */
static void pack(binding *b) {
    int64_t done[MAX_BUFFERS], count = 0, cleared = 0, slot;
    for (int zeroed = 1; zeroed >= 0; zeroed--) {
        for (int64_t n = 0; n < b->nbuffers; n++) {
            place *p = &b->buffers[n];
            if (p->slot >= 0 || (p->source == ZEROED) != zeroed) continue;
            if (zeroed) p->first = 0, p->last = b->nsteps;
            if (p->first < 0) p->first = p->last = 0;
            p->offset = fit(b, done, count, p);
            done[count++] = n;
            if (p->offset + p->bytes > b->workspace) b->workspace = p->offset + p->bytes;
            if (zeroed && p->offset + p->bytes > cleared) cleared = p->offset + p->bytes;
        }
    }
    if (!count) return;
    slot = b->workspace ? allocate(b, -1) : -1;
    for (int64_t i = 0; i < count; i++) b->buffers[done[i]].slot = slot;
    if (cleared) zero(b, slot, cleared);
}

/* 1 when every size of the rows [size, number] is divisible by (or at most) its number, 0 when not. */
static int holds(PyObject *rows, PyObject *dims, int divisible) {
    if (!rows || !PyList_Check(rows)) return ODD;
    for (Py_ssize_t i = 0; i < PyList_Size(rows); i++) {
        int64_t size, number;
        PyObject *row = PyList_GetItem(rows, i);
        if (size_of(item(row, 0), dims, &size, 0) || whole(item(row, 1), &number)) return ODD;
        if (divisible && number <= 0) return ODD;
        if (divisible ? size % number != 0 : size > number) return 0;
    }
    return 1;
}

/* Whether the arguments are what the kernel declares. */
static int agrees(const int64_t *args, int64_t count, PyObject *kinds) {
    if (!kinds || !PyTuple_Check(kinds) || PyTuple_Size(kinds) != count) return ODD;
    for (int64_t i = 0; i < count; i++) {
        PyObject *kind = PyTuple_GetItem(kinds, i);
        if (args[2 * i] != is(kind, "ptr")) return ODD;
        if (is(kind, "i32") && args[2 * i + 1] != (int32_t)args[2 * i + 1]) return ODD;
    }
    return 0;
}

/* One choice, when its guard holds; how many were written. */
static int choice(binding *b, PyObject *variant, const int64_t *args, int64_t count, words *w) {
    PyObject *guard = item(variant, 0), *aligned = item(guard, 0), *found = item(variant, 1);
    int64_t value;
    int divisible = holds(item(guard, 1), b->dims, 1), small = holds(item(guard, 2), b->dims, 0), code = ODD;
    if (divisible < 0 || small < 0 || !found || !aligned || !PyList_Check(aligned)) return ODD;
    if (!divisible || !small) return 0;
    if (!(found = PyObject_GetItem(b->kernels, found))) return ERROR;
    if (PyTuple_Check(found) && PyTuple_Size(found) == 5 && !agrees(args, count, PyTuple_GetItem(found, 4))) {
        code = 0;
        for (int i = 0; i < 4 && !code; i++) {
            code = whole(PyTuple_GetItem(found, i), &value);
            if (!code) code = put(w, value);
        }
    }
    Py_DECREF(found);
    if (code || put(w, PyList_Size(aligned))) return ODD;
    for (Py_ssize_t i = 0; i < PyList_Size(aligned); i++)
        if (whole(PyList_GetItem(aligned, i), &value) || put(w, value)) return ODD;
    return 1;
}

static int launch_of(binding *b, PyObject *step, words *w) {
    PyObject *variants = item(step, 2), *args = item(step, 3), *grid = item(step, 4);
    if (!variants || !PyList_Check(variants) || !args || !PyList_Check(args)) return ODD;
    int64_t count = PyList_Size(args), value, choices = 0;
    size_t head = w->size;
    if (count > MAX_ARGS - 8 || PyList_Size(variants) > 64) return ODD;
    for (int i = 0; i < 3; i++)
        if (size_of(item(grid, i), b->dims, &value, 0) || value < 0 || put(w, value)) return ODD;
    if (put(w, count) || put(w, 0)) return ODD;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *row = PyList_GetItem(args, i);
        int buffer = is(item(row, 0), "buffer");
        if (size_of(item(row, 1), b->dims, &value, 0) || put(w, buffer) || put(w, value)) return ODD;
        if (buffer && (value < 0 || value >= b->nbuffers)) return ODD;
    }
    for (Py_ssize_t i = 0; i < PyList_Size(variants); i++) {
        int made = choice(b, PyList_GetItem(variants, i), w->at + head + 5, count, w);
        if (made < 0) return made;
        choices += made;
    }
    w->at[head + 4] = choices;
    return choices ? 0 : ODD;
}

/* All of it in the order of runtime.dispatch.encode. */
static int write_all(binding *b, PyObject *steps, PyObject *driver, words *w) {
    int64_t value, slots = b->feeds + b->nfresh;
    int bad = 0;
    for (int i = 0; i < 3; i++)
        if (whole(PyTuple_GetItem(driver, i), &value) || put(w, value)) return ODD;
    if (slots > MAX_BUFFERS) return ODD;
    bad |= put(w, slots) | put(w, b->nbuffers) | put(w, b->nzeros) | put(w, b->nsteps);
    for (int64_t i = 0; i < slots; i++) bad |= put(w, b->nullable[i]);
    for (int64_t i = 0; i < b->nbuffers; i++) bad |= put(w, b->buffers[i].slot) | put(w, b->buffers[i].offset);
    for (int64_t i = 0; i < 3 * b->nzeros; i++) bad |= put(w, b->zeros[i]);
    if (bad) return ODD;
    for (int64_t i = 0; i < b->nsteps; i++) {
        int code = launch_of(b, PyList_GetItem(steps, i), w);
        if (code) return code;
    }
    return 0;
}

static int bind_all(binding *b, PyObject *buffers, PyObject *steps, PyObject *driver, PyObject *shapes, words *w) {
    for (int64_t i = 0; i < b->nbuffers; i++) {
        PyObject *number = PyLong_FromLongLong(i);
        b->buffers[i].own = number ? PySet_Contains(b->own, number) : -1;
        Py_XDECREF(number);
        if (b->buffers[i].own < 0) return ERROR;
        int code = place_one(b, PyList_GetItem(buffers, i), i, shapes);
        if (code) return code;
    }
    if (lives(b, steps)) return ODD;
    for (int64_t i = 0; i < b->nbuffers; i++)
        if (b->buffers[i].slot >= 0 && b->buffers[i].slot < b->feeds)
            b->read[b->buffers[i].slot] |= b->buffers[i].first >= 0 || b->buffers[i].own;
    for (int64_t i = 0; i < b->feeds; i++) b->nullable[i] |= !b->read[i];
    pack(b);
    return write_all(b, steps, driver, w);
}

static PyObject *numbers(const int64_t *values, int64_t count, size_t stride) {
    PyObject *out = PyTuple_New(count);
    for (int64_t i = 0; out && i < count; i++) {
        PyObject *value = PyLong_FromLongLong(*(const int64_t *)((const char *)values + i * stride));
        if (!value || PyTuple_SetItem(out, i, value)) Py_CLEAR(out);
    }
    return out;
}

static PyObject *bind(PyObject *self, PyObject *args) {
    PyObject *rows, *dims, *kernels, *driver, *own, *shapes, *out = NULL;
    long long feeds, saved;
    int backward, code;
    if (!PyArg_ParseTuple(args, "OO!(LLpO)OO!", &rows, &PyDict_Type, &dims, &feeds, &saved, &backward, &own, &kernels,
                          &PyTuple_Type, &driver))
        return NULL;
    PyObject *buffers = item(rows, 0), *steps = item(rows, 1);
    if (!buffers || !steps || !PyList_Check(buffers) || !PyList_Check(steps) || !PyList_Size(steps) ||
        PyList_Size(buffers) >= MAX_BUFFERS || PyTuple_Size(driver) != 3 || feeds < 0 || feeds > MAX_BUFFERS ||
        saved < 0 || saved > MAX_BUFFERS)
        Py_RETURN_NONE;
    binding *b = calloc(1, sizeof(binding));
    words w = {NULL, 0, 0};
    if (!b) return PyErr_NoMemory();
    b->feeds = feeds, b->saved = saved, b->backward = backward;
    b->nbuffers = PyList_Size(buffers), b->nsteps = PyList_Size(steps);
    b->dims = dims, b->own = own, b->kernels = kernels;
    shapes = PyTuple_New(b->nbuffers);
    code = shapes ? bind_all(b, buffers, steps, driver, shapes, &w) : ERROR;
    if (!code)
        out = Py_BuildValue("(y#ONNLN)", (const char *)w.at, (Py_ssize_t)(w.size * 8), shapes,
                            numbers(&b->buffers[0].slot, b->nbuffers, sizeof(place)),
                            numbers(b->fresh, b->nfresh, sizeof(int64_t)), (long long)b->workspace,
                            numbers(&b->buffers[0].first, b->nbuffers, sizeof(place)));
    else if (code == ODD && !PyErr_Occurred())
        out = Py_NewRef(Py_None);
    Py_XDECREF(shapes);
    free(w.at);
    free(b);
    return out;
}
