/* What _node.cpp and _calls.h need of torch: memory, streams, and numbers from Python. */
#pragma once
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty_strided.h>
#include <dlfcn.h>
#include <sys/mman.h>

#include <vector>

namespace esper {

using at::Tensor;

/* An owned reference that may be dropped by a thread of the engine, which does not hold the interpreter. */
struct Held {
    PyObject* object = nullptr;
    Held() = default;
    explicit Held(PyObject* o) : object(o) { Py_XINCREF(o); }
    Held(Held&& other) noexcept : object(other.object) { other.object = nullptr; }
    Held& operator=(Held&& other) noexcept {
        std::swap(object, other.object);
        return *this;
    }
    ~Held() {
        if (!object || !Py_IsInitialized()) return;
        pybind11::gil_scoped_acquire gil;
        Py_DECREF(object);
    }
};

inline std::vector<int64_t> integers(pybind11::handle sequence) {
    std::vector<int64_t> out;
    for (pybind11::handle item : pybind11::reinterpret_borrow<pybind11::sequence>(sequence))
        out.push_back(item.cast<int64_t>());
    return out;
}

/* Memory to allocate; `late`: a library call brings it. */
struct Fresh {
    std::vector<int64_t> sizes, strides;
    at::ScalarType dtype;
    bool late = false;
};

/* -- the card: found in torch's own library when it is loaded, so that one source serves builds with and without it */

typedef at::TensorBase (*empty_cuda_fn)(at::IntArrayRef, at::IntArrayRef, at::ScalarType, std::optional<at::Device>);
typedef int32_t (*stream_fn)(int32_t, void**);

inline void* from_cuda(const char* symbol) {
    void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    return library ? dlsym(library, symbol) : nullptr;
}

/* Huge pages for a large result, as `runtime/pages.py` says. */
constexpr size_t LARGE = 4 << 20;
constexpr uintptr_t PAGE = 4096;

inline Tensor on_huge_pages(Tensor made) {
    const size_t nbytes = made.storage().nbytes();
    if (nbytes >= LARGE) {
        const uintptr_t first = (uintptr_t)made.storage().data();
        const uintptr_t begin = (first + PAGE - 1) / PAGE * PAGE, end = (first + nbytes) / PAGE * PAGE;
        madvise((void*)begin, end - begin, MADV_HUGEPAGE); /* a refusal is no matter: pages are small then */
    }
    return made;
}

inline Tensor allocate(const Fresh& f, int64_t index) {
    if (index < 0) return on_huge_pages(Tensor(at::detail::empty_strided_cpu(f.sizes, f.strides, f.dtype)));
    static auto made = (empty_cuda_fn)from_cuda(
        "_ZN2at6detail18empty_strided_cudaEN3c108ArrayRefIlEES3_NS1_10ScalarTypeESt8optionalINS1_6DeviceEE");
    at::Device device(at::kCUDA, (c10::DeviceIndex)index);
    if (made) return Tensor(made(f.sizes, f.strides, f.dtype, device));
    at::AutoDispatchBelowADInplaceOrView below;
    return at::empty_strided(f.sizes, f.strides, at::TensorOptions().dtype(f.dtype).device(device));
}

inline bool stream_of(int64_t index, void** stream) {
    static auto current = (stream_fn)from_cuda("aoti_torch_get_current_cuda_stream");
    *stream = nullptr;
    return index < 0 || (current && current((int32_t)index, stream) == 0);
}

/* The same memory seen otherwise: what as_strided gives, without the dispatcher. */
inline Tensor seen_as(const Tensor& t, at::IntArrayRef sizes, at::IntArrayRef strides) {
    Tensor out = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(t.storage()), t.key_set(),
                                                          t.dtype());
    out.unsafeGetTensorImpl()->set_storage_offset(t.storage_offset());
    out.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
    return out;
}

}  // namespace esper
