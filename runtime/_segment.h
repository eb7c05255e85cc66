/* A run of kernel launches bound to sizes: the layout is that of runtime.dispatch.encode. Shared by the C dispatcher
 * (_native.c) and the autograd node (_node.cpp): the words are read once, checked, and trusted afterwards.
 */
#pragma once
#include <stdint.h>
#include <string.h>

#define SEGMENT "runtime._native.segment"
#define MAX_BUFFERS 256
#define MAX_ARGS 256
#define NULL_SLOT (-1)
#define NO_VARIANT (-2)

typedef int (*cuda_launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **,
                           void **);
typedef int (*cuda_clear)(void *, unsigned char, size_t, void *);
typedef void (*cpu_entry)(void *const *, int64_t, int64_t, int64_t);

typedef struct {
    const int64_t *grid; /* gx gy gz nargs nchoices */
    const int64_t *args; /* (is buffer, value) */
    const int64_t *choices;
    int64_t *counts;
} step;

typedef struct {
    int64_t kind, nslots, nplaces, nzeros, nsteps, nchoices;
    cuda_launch launch;
    cuda_clear clear;
    const int64_t *nullable, *places, *zeros;
    int64_t *words, *counts;
    step *steps;
} segment;

static void *null_argument = NULL; /* scratch that no kernel of ours uses */

static const int64_t *choose(const step *t, const int64_t *address) {
    const int64_t *c = t->choices;
    for (int64_t i = 0; i < t->grid[4]; i++, c += 5 + c[4]) {
        int64_t bits = 0;
        for (int64_t k = 0; k < c[4]; k++) bits |= address[c[5 + k]];
        if (!(bits & 15)) {
            __atomic_fetch_add(&t->counts[i], 1, __ATOMIC_RELAXED);
            return c;
        }
    }
    return NULL;
}

static int run_step(const segment *s, const step *t, const int64_t *address, void *stream) {
    void *args[MAX_ARGS];
    const int64_t *g = t->grid, *c;
    int64_t n = g[3];
    if (!g[0] || !g[1] || !g[2]) return 0;
    c = choose(t, address);
    if (!c) return NO_VARIANT;
    for (int64_t a = 0; a < n; a++)
        args[a] = t->args[2 * a] ? (void *)&address[t->args[2 * a + 1]] : (void *)&t->args[2 * a + 1];
    if (!s->kind) {
        ((cpu_entry)(intptr_t)c[0])(args, g[0], g[1], g[2]);
        return 0;
    }
    for (int64_t a = 0; a < c[3]; a++) args[n + a] = (void *)&null_argument;
    return s->launch((void *)(intptr_t)c[0], g[0], g[1], g[2], c[1], 1, 1, c[2], stream, args, NULL);
}

static int run(const segment *s, const int64_t *base, void *stream, int64_t *at) {
    int64_t address[MAX_BUFFERS];
    for (int64_t i = 0; i < s->nplaces; i++)
        address[i] = s->places[2 * i] < 0 ? 0 : base[s->places[2 * i]] + s->places[2 * i + 1];
    for (int64_t i = 0; i < s->nzeros; i++) {
        const int64_t *z = s->zeros + 3 * i;
        void *to = (void *)(intptr_t)(base[z[0]] + z[1]);
        int code = 0;
        if (s->kind)
            code = s->clear(to, 0, z[2], stream);
        else
            memset(to, 0, z[2]);
        if (code) return code;
    }
    for (*at = 0; *at < s->nsteps; ++*at) {
        int code = run_step(s, &s->steps[*at], address, stream);
        if (code) return code;
    }
    return 0;
}
