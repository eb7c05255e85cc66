/* A libcuda that launches nothing and remembers everything: handles are counted up, parameters are copied out. */
#include <stdint.h>
#include <string.h>
#define API __attribute__((visibility("default")))
typedef struct {
    uint64_t function, stream;
    uint32_t grid[3], block[3], shared;
    uint64_t param[16];
} record;
API record stub_log[4096];
API int stub_count, stub_nparams = 8, stub_fail_at = -1, stub_fail_code, stub_loads, stub_unloads, stub_attributes;
API int stub_sizes[16] = {8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8};
API int stub_load_code, stub_memsets, stub_capability = 90;
static __thread uint64_t current;
static uint64_t next_handle = 0x1000;
API int cuInit(unsigned f) { return 0; }
API int cuDriverGetVersion(int *v) { *v = 13000; return 0; }
API int cuDeviceGetCount(int *n) { *n = 2; return 0; }
API int cuDeviceGet(int *d, int i) { *d = i; return i < 2 ? 0 : 101; }
API int cuDeviceGetAttribute(int *v, int a, int d) {
    *v = a == 75 ? stub_capability / 10 : a == 76 ? stub_capability % 10 : a == 97 ? 232448 : 0;
    return 0;
}
API int cuDevicePrimaryCtxRetain(uint64_t *c, int d) { *c = 0xC0 + d; return 0; }
API int cuDevicePrimaryCtxRelease_v2(int d) { return 0; }
API int cuCtxGetCurrent(uint64_t *c) { *c = current; return 0; }
API int cuCtxSetCurrent(uint64_t c) { current = c; return 0; }
API int cuCtxSynchronize(void) { return current ? 0 : 201; }
API int cuLibraryLoadData(uint64_t *l, const void *d, void *a, void *b, unsigned n, void *e, void *f, unsigned m) {
    if (stub_load_code) { int c = stub_load_code; stub_load_code = 0; return c; }
    stub_loads++;
    *l = next_handle++;
    return 0;
}
API int cuLibraryUnload(uint64_t l) { stub_unloads++; return 0; }
API int cuLibraryGetKernel(uint64_t *k, uint64_t l, const char *name) {
    *k = next_handle++;
    return strcmp(name, "absent") ? 0 : 500;
}
API int cuKernelGetFunction(uint64_t *f, uint64_t k) { *f = k + 0x100000; return 0; }
API int cuFuncSetAttribute(uint64_t f, int a, int v) { stub_attributes++; return 0; }
API int cuMemsetD8Async(uint64_t p, unsigned char v, size_t n, uint64_t s) { stub_memsets++; return 0; }
API int cuGetErrorName(int e, const char **s) {
    *s = e == 201 ? "CUDA_ERROR_INVALID_CONTEXT" : e == 500 ? "CUDA_ERROR_NOT_FOUND" : "CUDA_ERROR_STUB";
    return 0;
}
API int cuLaunchKernel(uint64_t f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                       unsigned sh, uint64_t s, void **p, void **e) {
    if (!current) return 201;
    if (stub_fail_at == stub_count) return stub_fail_code;
    record *r = &stub_log[stub_count++ % 4096];
    *r = (record){f, s, {gx, gy, gz}, {bx, by, bz}, sh, {0}};
    for (int i = 0; i < stub_nparams; i++) memcpy(&r->param[i], p[i], stub_sizes[i]);
    return 0;
}
