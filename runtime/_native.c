/* Launches all kernels of a plan's segment in one call: argument blocks on the stack, the interpreter released.
 *
 * segment(words: bytes) -> capsule       the layout is that of runtime.dispatch.encode
 * launch(capsule, stream: int, slots: list) -> None | (code, number)
 * counts(capsule) -> list[int]           how often each choice of each launch was taken
 * lookup(hot, tensors, types, grad)      the plan that a call of this signature took before
 * bound(...)                             a plan bound to sizes, see _bind.h
 *
 * Slots are tensors (asked for data_ptr()) or integers. Only CPython's limited API and no torch header is used: one
 * binary serves every Python from 3.11 and every torch. The driver's functions arrive as addresses.
 */
#define PY_SSIZE_T_CLEAN
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030B0000
#endif
#include <Python.h>

#include <stdlib.h>

#include "_bind.h"
#include "_segment.h"

static PyObject *data_ptr, *name_dtype, *name_device, *name_contiguous, *name_grad, *name_shape, *name_cpu, *name_neg;

static void release(segment *s) {
    if (s) {
        free(s->words);
        free(s->counts);
        free(s->steps);
        free(s);
    }
}

/* Every count and index is checked here, so that launch can trust them. */
static int read_steps(segment *s, const int64_t *w, const int64_t *end) {
    int64_t total = 0;
    for (int64_t i = 0; i < s->nsteps; i++) {
        step *t = &s->steps[i];
        if (end - w < 5 || w[3] < 0 || w[3] > MAX_ARGS - 8 || w[4] < 1 || w[4] > 64) return 0;
        t->grid = w;
        t->args = w + 5;
        w += 5 + 2 * t->grid[3];
        if (w > end) return 0;
        for (int64_t a = 0; a < t->grid[3]; a++)
            if (t->args[2 * a] && (t->args[2 * a + 1] < 0 || t->args[2 * a + 1] >= s->nplaces)) return 0;
        t->choices = w;
        for (int64_t c = 0; c < t->grid[4]; c++, total++) {
            if (end - w < 5 || w[3] < 0 || w[3] > 8 || w[4] < 0 || w[4] > end - w - 5) return 0;
            for (int64_t k = 0; k < w[4]; k++)
                if (w[5 + k] < 0 || w[5 + k] >= s->nplaces) return 0;
            w += 5 + w[4];
        }
    }
    s->nchoices = total;
    s->counts = calloc(total + 1, sizeof(int64_t));
    if (!s->counts) return 0;
    total = 0;
    for (int64_t i = 0; i < s->nsteps; i++) {
        s->steps[i].counts = s->counts + total;
        total += s->steps[i].grid[4];
    }
    return w == end;
}

static int read_segment(segment *s, const char *bytes, Py_ssize_t size) {
    int64_t n = size / 8;
    if (size % 8 || n < 7) return 0;
    s->words = malloc(size);
    if (!s->words) return 0;
    memcpy(s->words, bytes, size);
    const int64_t *w = s->words, *end = w + n;
    s->kind = w[0];
    s->launch = (cuda_launch)(intptr_t)w[1];
    s->clear = (cuda_clear)(intptr_t)w[2];
    s->nslots = w[3];
    s->nplaces = w[4];
    s->nzeros = w[5];
    s->nsteps = w[6];
    if (s->nslots < 0 || s->nslots > MAX_BUFFERS || s->nplaces < 0 || s->nplaces > MAX_BUFFERS) return 0;
    if (s->nzeros < 0 || s->nzeros > n || s->nsteps < 0 || s->nsteps > n) return 0;
    s->nullable = w + 7;
    s->places = s->nullable + s->nslots;
    s->zeros = s->places + 2 * s->nplaces;
    w = s->zeros + 3 * s->nzeros;
    if (w > end) return 0;
    for (int64_t i = 0; i < s->nplaces; i++)
        if (s->places[2 * i] < -1 || s->places[2 * i] >= s->nslots) return 0;
    for (int64_t i = 0; i < s->nzeros; i++)
        if (s->zeros[3 * i] < 0 || s->zeros[3 * i] >= s->nslots) return 0;
    s->steps = calloc(s->nsteps + 1, sizeof(step));
    return s->steps && read_steps(s, w, end);
}

static void destroy(PyObject *capsule) { release((segment *)PyCapsule_GetPointer(capsule, SEGMENT)); }

static PyObject *make_segment(PyObject *self, PyObject *arg) {
    char *bytes;
    Py_ssize_t size;
    if (PyBytes_AsStringAndSize(arg, &bytes, &size)) return NULL;
    segment *s = calloc(1, sizeof(segment));
    if (!s) return PyErr_NoMemory();
    if (!read_segment(s, bytes, size)) {
        release(s);
        PyErr_SetString(PyExc_ValueError, "malformed segment");
        return NULL;
    }
    PyObject *capsule = PyCapsule_New(s, SEGMENT, destroy);
    if (!capsule) release(s);
    return capsule;
}

/* Addresses of all slots; 0 ok, 1 Python error, 2 a slot without memory (its number in *at). */
static int addresses_of(segment *s, PyObject *slots, int64_t *base, int64_t *at) {
    for (int64_t i = 0; i < s->nslots; i++) {
        PyObject *item = PyList_GetItem(slots, i); /* borrowed */
        if (!item) return 1;
        if (PyLong_Check(item)) {
            base[i] = (int64_t)PyLong_AsUnsignedLongLong(item);
        } else {
            PyObject *value = PyObject_CallMethodObjArgs(item, data_ptr, NULL);
            if (!value) return 1;
            base[i] = (int64_t)PyLong_AsUnsignedLongLong(value);
            Py_DECREF(value);
        }
        if (base[i] == -1 && PyErr_Occurred()) return 1;
        if (!base[i] && !s->nullable[i]) {
            *at = i;
            return 2;
        }
    }
    return 0;
}

static PyObject *launch(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    int64_t base[MAX_BUFFERS], at = 0;
    if (n != 3 || !PyList_Check(args[2])) {
        PyErr_SetString(PyExc_TypeError, "launch(segment, stream, slots: list)");
        return NULL;
    }
    segment *s = PyCapsule_GetPointer(args[0], SEGMENT);
    if (!s) return NULL;
    uint64_t stream = PyLong_AsUnsignedLongLong(args[1]);
    if (stream == (uint64_t)-1 && PyErr_Occurred()) return NULL;
    int code = addresses_of(s, args[2], base, &at);
    if (code == 1) return NULL;
    if (code == 2) {
        code = NULL_SLOT;
    } else {
        PyThreadState *state = PyEval_SaveThread();
        code = run(s, base, (void *)(uintptr_t)stream, &at);
        PyEval_RestoreThread(state);
    }
    if (code) return Py_BuildValue("iL", code, (long long)at);
    Py_INCREF(Py_None);
    return Py_None;
}

/* 1 when the tensor is of a plain class and of this dtype and device, dense and, on a card, at a multiple of 16 bytes;
 * 0 when not; -1 Python error. */
static int is_plain(PyObject *t, PyObject *dtype, PyObject *classes, long index) {
    Py_ssize_t n = PyTuple_Size(classes), i = 0;
    while (i < n && (PyObject *)Py_TYPE(t) != PyTuple_GetItem(classes, i)) i++;
    if (i == n) return 0;
    PyObject *value = PyObject_GetAttr(t, name_dtype);
    if (!value) return -1;
    int same = value == dtype;
    Py_DECREF(value);
    if (!same) return 0;
    if (!(value = PyObject_CallMethodObjArgs(t, name_device, NULL))) return -1;
    same = PyLong_AsLong(value) == index;
    Py_DECREF(value);
    if (!same) return 0;
    if (!(value = PyObject_CallMethodObjArgs(t, name_contiguous, NULL))) return -1;
    same = value == Py_True;
    Py_DECREF(value);
    if (!same) return same;
    if (index < 0) { /* so has a meta tensor */
        if (!(value = PyObject_GetAttr(t, name_cpu))) return -1;
        same = value == Py_True;
        Py_DECREF(value);
        return same;
    }
    if (!(value = PyObject_CallMethodObjArgs(t, data_ptr, NULL))) return -1;
    uint64_t address = PyLong_AsUnsignedLongLong(value);
    Py_DECREF(value);
    return PyErr_Occurred() ? -1 : !(address & 15);
}

/* A tensor of one element is contiguous under any stride, so it may be a lazily negated view. */
static int negated(PyObject *t, PyObject *shape) {
    for (Py_ssize_t i = 0; i < PyTuple_Size(shape); i++)
        if (PyLong_AsLong(PyTuple_GetItem(shape, i)) != 1) return PyErr_Occurred() ? -1 : 0;
    PyObject *value = PyObject_CallMethodObjArgs(t, name_neg, NULL);
    if (!value) return -1;
    int found = value == Py_True;
    Py_DECREF(value);
    return found;
}

static int wants_grad(PyObject *t) {
    PyObject *value = PyObject_GetAttr(t, name_grad);
    if (!value) return -1;
    int found = value == Py_True;
    Py_DECREF(value);
    return found;
}

/* lookup(hot: dict, tensors: list, (dtypes, classes, device index), grad: bool) -> what is stored, or None. As
 * runtime.functions.python_lookup. */
static PyObject *lookup(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 4 || !PyDict_Check(args[0]) || !PyList_Check(args[1]) || !PyTuple_Check(args[2]) ||
        PyTuple_Size(args[2]) != 3) {
        PyErr_SetString(PyExc_TypeError, "lookup(hot, tensors: list, types, grad)");
        return NULL;
    }
    PyObject *tensors = args[1], *dtypes = PyTuple_GetItem(args[2], 0), *classes = PyTuple_GetItem(args[2], 1);
    long index = PyLong_AsLong(PyTuple_GetItem(args[2], 2));
    Py_ssize_t n = PyList_Size(tensors);
    int grad = args[3] == Py_True, asked = 0, ok = n == PyTuple_Size(dtypes);
    if (PyErr_Occurred()) return NULL;
    PyObject *key = PyTuple_New(ok ? n : 0), *pair = NULL;
    if (!key) return NULL;
    for (Py_ssize_t i = 0; ok == 1 && i < n; i++) {
        PyObject *t = PyList_GetItem(tensors, i);
        ok = is_plain(t, PyTuple_GetItem(dtypes, i), classes, index);
        if (ok == 1 && grad && !asked && (asked = wants_grad(t)) < 0) ok = -1;
        if (ok != 1) break;
        PyObject *shape = PyObject_GetAttr(t, name_shape);
        if (!shape || PyTuple_SetItem(key, i, shape)) ok = -1;
        if (ok == 1) ok = negated(t, shape) ? -!!PyErr_Occurred() : 1;
    }
    if (ok == 1) pair = PyDict_GetItemWithError(args[0], key);
    Py_DECREF(key);
    if (ok < 0 || PyErr_Occurred()) return NULL;
    PyObject *found = pair && PyList_Check(pair) ? PyList_GetItem(pair, asked) : Py_None;
    if (!found) return NULL;
    Py_INCREF(found);
    return found;
}

static PyObject *counts(PyObject *self, PyObject *capsule) {
    segment *s = PyCapsule_GetPointer(capsule, SEGMENT);
    if (!s) return NULL;
    PyObject *out = PyList_New(s->nchoices);
    for (int64_t i = 0; out && i < s->nchoices; i++) {
        PyObject *value = PyLong_FromLongLong(__atomic_load_n(&s->counts[i], __ATOMIC_RELAXED));
        if (!value || PyList_SetItem(out, i, value)) {
            Py_DECREF(out);
            return NULL;
        }
    }
    return out;
}

static PyMethodDef methods[] = {
    {"segment", make_segment, METH_O, "capsule of an encoded segment"},
    {"launch", (PyCFunction)(void (*)(void))launch, METH_FASTCALL, "launch a segment on a stream"},
    {"lookup", (PyCFunction)(void (*)(void))lookup, METH_FASTCALL, "the plan known for a call, or None"},
    {"bound", bind, METH_VARARGS, "a plan of kernels bound to sizes, or None"},
    {"counts", counts, METH_O, "how often each choice was taken"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_native", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) {
    data_ptr = PyUnicode_InternFromString("data_ptr");
    name_dtype = PyUnicode_InternFromString("dtype");
    name_device = PyUnicode_InternFromString("get_device");
    name_contiguous = PyUnicode_InternFromString("is_contiguous");
    name_grad = PyUnicode_InternFromString("requires_grad");
    name_shape = PyUnicode_InternFromString("shape");
    name_cpu = PyUnicode_InternFromString("is_cpu");
    name_neg = PyUnicode_InternFromString("is_neg");
    return PyErr_Occurred() ? NULL : PyModule_Create(&module);
}
