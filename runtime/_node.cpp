/* A block's call in one C++ function, with an autograd node that runs backward without the interpreter.
 *
 * block(dtypes, classes, index, gradients) -> capsule    what one block gives to its calls; index -1: the cpu
 * learn(capsule, shapes, asked, dims, parts, fresh, outputs, saved) -> bool    a plan for calls of these shapes; a part
 *     is a segment of kernels or a library call as runtime.executor.Extern.described gives it
 * call(capsule, tensors: list) -> result | None           None: not known, or odd in some way; nothing has happened
 * launches(capsule) -> int, copies(capsule) -> int
 * perform(call, tensors: list) -> list | None    one library call alone; None: only Python can
 * prepare(parts, fresh, given, index) -> capsule | None    a plan by itself, for callers that brought `given` slots
 * execute(capsule, slots: list) -> bool    runs it and appends its memory to the list; False: nothing was appended
 *
 * Only the common case is here: plain dense tensors of the learnt shapes, plans of kernels and of the library calls in
 * _calls.h. All else is answered by runtime/functions.py, which `gradients` reaches from backward:
 * gradients.describe(mask, dims) gives (parts, fresh, returns) or None, gradients(dims, mask, saved, cotangents) the
 * gradients.
 *
 * Built by `python -m runtime build` against the torch that is installed; its internals are used, so a file serves
 * exactly one version of torch and of Python, and its name says which.
 */
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <c10/core/DeviceGuard.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>

#include "_calls.h"
#include "_segment.h"

namespace esper {

using torch::autograd::edge_list;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

constexpr int FORMAT = 4;      // of what Python passes; as in runtime/node.py
constexpr size_t LIMIT = 256;  // learnt tuples of shapes per block, as READY_LIMIT

struct Part {
    const segment* run = nullptr;
    std::unique_ptr<Call> call;
};

struct Plan {
    Held owner;
    std::vector<Part> parts;
    std::vector<Fresh> fresh;
    int64_t launches = 0, slots = 0;
    bool calls = false;
};

struct Backward {
    Plan plan;
    std::vector<int64_t> returns;  // per input the slot of its gradient, -1: none
    std::vector<char> reads;       // per saved tensor and cotangent whether the plan does
};

struct Shared {
    std::vector<at::ScalarType> dtypes;
    std::vector<PyTypeObject*> classes;
    Held class_owner, gradients;
    std::string title;  // of the backward, in profiles
    int64_t index = -1;
    std::atomic<int64_t> launches{0}, copies{0};
};

struct Path {
    Plan plan;
    std::vector<int64_t> outputs, saved;
    std::vector<Fresh> kept, made;  // the saved ones, the outputs
};

/* What is known for one tuple of shapes. Plans are never taken away, so a reader needs no lock once it has one. */
struct Entry {
    std::shared_ptr<Shared> shared;
    Held dims;
    std::unique_ptr<Path> paths[2];  // without a graph, with one
    std::mutex mutex;
    std::vector<std::pair<uint64_t, std::unique_ptr<Backward>>> backward;
};

using Key = std::vector<int64_t>;
struct KeyHash {
    size_t operator()(const Key& key) const {
        uint64_t h = 1469598103934665603ull;
        for (int64_t v : key) h = (h ^ (uint64_t)v) * 1099511628211ull;
        return (size_t)h;
    }
};

struct Block {
    std::shared_ptr<Shared> shared = std::make_shared<Shared>();
    std::unordered_map<Key, std::shared_ptr<Entry>, KeyHash> entries;
    Key last_key;
    std::shared_ptr<Entry> last;
};

constexpr const char* NAME = "runtime._node.block";

/* What a tensor may be that is its elements in memory and nothing more. All else is odd: lazily negated, nested,
 * batched by vmap, watched by Python, and what later releases of torch invent. */
const c10::DispatchKeySet USUAL({c10::DispatchKey::CPU, c10::DispatchKey::CUDA, c10::DispatchKey::AutogradCPU,
                                 c10::DispatchKey::AutogradCUDA, c10::DispatchKey::AutocastCPU,
                                 c10::DispatchKey::AutocastCUDA, c10::DispatchKey::ADInplaceOrView});

bool plain(const Tensor& t, at::ScalarType dtype, int64_t index) {
    if (!t.defined() || (t.key_set().raw_repr() & ~USUAL.raw_repr())) return false;
    if (t.scalar_type() != dtype || t.layout() != at::kStrided) return false;
    if (index < 0 ? !t.device().is_cpu() : !(t.device().is_cuda() && t.device().index() == index)) return false;
    if (!t.is_contiguous()) return false;
    return index < 0 || !((uintptr_t)t.const_data_ptr() & 15);
}

/* One run of kernels, then what it needs to know of memory that calls have brought. */
bool launch(const segment* s, const std::vector<Tensor>& slots, void* stream) {
    int64_t base[MAX_BUFFERS], at = 0;
    for (size_t i = 0; i < slots.size(); i++) {
        const bool there = slots[i].defined();
        base[i] = there ? (int64_t)(uintptr_t)slots[i].const_data_ptr() : 0;
        if (there && !base[i] && !s->nullable[i]) return false;
    }
    return !run(s, base, stream, &at);
}

/* Appends fresh memory to the slots and runs; false when something must be answered by the slower path. */
bool execute(const Plan& plan, std::vector<Tensor>& slots, Shared& shared) {
    const size_t given = slots.size();
    void* stream;
    if ((int64_t)(given + plan.fresh.size()) != plan.slots) return false;
    for (const Part& p : plan.parts)
        if (p.call && p.call->odd->load(std::memory_order_relaxed)) return false;
    if (!stream_of(shared.index, &stream)) return false;
    for (const Fresh& f : plan.fresh) slots.push_back(f.late ? Tensor() : allocate(f, shared.index));
    std::optional<Below> below;
    if (plan.calls) below.emplace();
    for (const Part& p : plan.parts)
        if (p.call ? !perform(*p.call, slots, plan.fresh, given, shared.index) : !launch(p.run, slots, stream))
            return false;
    shared.launches.fetch_add(plan.launches, std::memory_order_relaxed);
    return true;
}

/* -- from Python ---------------------------------------------------------------------------------------------- */

/* Whether a part before reads, writes or clears the slot. */
bool touched(const Plan& plan, int64_t slot) {
    for (const Part& p : plan.parts) {
        if (p.call) {
            for (auto* side : {&p.call->inputs, &p.call->outs})
                for (const View& v : *side)
                    if (v.slot == slot) return true;
            continue;
        }
        for (int64_t i = 0; i < p.run->nzeros; i++)
            if (p.run->zeros[3 * i] == slot) return true;
        for (int64_t i = 0; i < p.run->nsteps; i++) {
            const step& s = p.run->steps[i];
            for (int64_t a = 0; a < s.grid[3]; a++)
                if (s.args[2 * a] && p.run->places[2 * s.args[2 * a + 1]] == slot) return true;
        }
    }
    return false;
}

/* Whether the call fits; what the library brings is not set aside before. */
bool add_call(std::unique_ptr<Call> call, size_t given, Plan& plan) {
    for (auto* side : {&call->inputs, &call->outs})
        for (const View& v : *side)
            if (v.slot < 0 || v.slot >= plan.slots) return false;
    for (const View& v : call->outs)
        if (v.slot >= (int64_t)given && v.whole && call->makes && !call->shaped && !touched(plan, v.slot))
            plan.fresh[v.slot - given].late = true;
    plan.calls = true;
    plan.launches += (int64_t)(call->pair ? 2 : 1);
    plan.parts.push_back({nullptr, std::move(call)});
    return true;
}

/* False: there is a call in it that only Python can do. */
bool read_parts(pybind11::handle all, size_t given, Plan& plan) {
    auto parts = all.cast<pybind11::tuple>();
    for (size_t i = 0; i < parts.size(); i++) {
        pybind11::handle item = parts[i];
        if (PyTuple_Check(item.ptr())) {
            auto call = i + 1 < parts.size() ? read_pair(item, parts[i + 1]) : nullptr;
            if (call)
                i++;
            else
                call = read_call(item);
            if (!call || !add_call(std::move(call), given, plan)) return false;
            continue;
        }
        auto run = (const segment*)PyCapsule_GetPointer(item.ptr(), SEGMENT);
        if (!run) throw python_error();
        if (run->nslots != plan.slots) return false;
        plan.launches += run->nsteps;
        plan.parts.push_back({run, nullptr});
    }
    return true;
}

/* `given`: tensors that a call of the plan brings. */
std::optional<Plan> read_plan(PyObject* parts, PyObject* fresh, size_t given) {
    Plan plan;
    plan.owner = Held(parts);
    for (pybind11::handle item : pybind11::reinterpret_borrow<pybind11::sequence>(fresh)) {
        auto row = item.cast<pybind11::tuple>();
        plan.fresh.push_back({integers(row[0]), integers(row[1]),
                              ((THPDtype*)pybind11::object(row[2]).ptr())->scalar_type});
    }
    plan.slots = (int64_t)(given + plan.fresh.size());
    if (plan.slots > MAX_BUFFERS || !read_parts(parts, given, plan)) return std::nullopt;
    return plan;
}

/* The plan for these gradients, asked for once. */
const Backward* backward_for(Entry& entry, uint64_t mask, const std::vector<bool>& wanted, size_t given) {
    {
        std::lock_guard<std::mutex> lock(entry.mutex);
        for (auto& known : entry.backward)
            if (known.first == mask) return known.second.get();
    }
    pybind11::gil_scoped_acquire gil;
    pybind11::tuple asked(wanted.size());
    for (size_t i = 0; i < wanted.size(); i++) asked[i] = pybind11::bool_(wanted[i]);
    pybind11::handle gradients(entry.shared->gradients.object);
    pybind11::object found = gradients.attr("describe")(asked, pybind11::handle(entry.dims.object));
    std::unique_ptr<Backward> made;
    if (!found.is_none()) {
        auto row = found.cast<pybind11::tuple>();
        auto plan = read_plan(pybind11::object(row[0]).ptr(), pybind11::object(row[1]).ptr(), given);
        if (plan) made = std::make_unique<Backward>(std::move(*plan), integers(row[2]));
        for (size_t i = 0; made && i < given; i++) {
            auto& handed = made->returns;
            const bool on = std::find(handed.begin(), handed.end(), (int64_t)i) != handed.end();
            made->reads.push_back(on || touched(made->plan, (int64_t)i));
        }
    }
    std::lock_guard<std::mutex> lock(entry.mutex);
    for (auto& known : entry.backward)
        if (known.first == mask) return known.second.get();
    entry.backward.emplace_back(mask, std::move(made));
    return entry.backward.back().second.get();
}

/* -- backward ------------------------------------------------------------------------------------------------- */

struct EsperBackward : public Node {
    std::shared_ptr<Entry> entry;
    std::vector<SavedVariable> saved;

    EsperBackward(std::shared_ptr<Entry> e, edge_list&& edges) : Node(std::move(edges)), entry(std::move(e)) {}

    std::string name() const override { return entry->shared->title; }

    void release_variables() override {
        std::lock_guard<std::mutex> lock(mutex_);
        for (auto& s : saved) s.reset_data();
    }

    void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const {  // nothing to trace here
        pybind11::gil_scoped_acquire gil;
        pybind11::handle(entry->shared->gradients.object).attr("not_traced")();
    }

    variable_list apply(variable_list&& cotangents) override {
        std::lock_guard<std::mutex> lock(mutex_);
        Shared& shared = *entry->shared;
        uint64_t mask = 0;
        std::vector<bool> wanted(num_outputs());
        for (size_t i = 0; i < wanted.size(); i++)
            if ((wanted[i] = task_should_compute_output(i))) mask |= 1ull << i;
        std::vector<Tensor> slots;
        slots.reserve(saved.size() + cotangents.size() + 16);
        for (auto& s : saved) slots.push_back(s.unpack(getptr()));
        for (auto& c : cotangents) slots.push_back(c);
        const size_t given = slots.size();
        bool easy = !at::GradMode::is_enabled();
        const auto& kept = entry->paths[1]->kept;  // hooks give back what they like; the engine checks cotangents
        easy = easy && std::any_of(cotangents.begin(), cotangents.end(), [](const Tensor& c) { return c.defined(); });
        for (size_t i = 0; easy && i < given; i++) {
            if (i >= kept.size() && !slots[i].defined()) continue;  // nobody asks for that result's gradient
            if (i >= kept.size()) condense(slots[i], shared);
            easy = plain(slots[i], i < kept.size() ? kept[i].dtype : slots[i].scalar_type(), shared.index);
            easy = easy && (i >= kept.size() || slots[i].sizes() == at::IntArrayRef(kept[i].sizes));
        }
        if (easy) {
            c10::OptionalDeviceGuard guard;
            if (shared.index >= 0) guard.reset_device(at::Device(at::kCUDA, (c10::DeviceIndex)shared.index));
            const Backward* known = backward_for(*entry, mask, wanted, given);
            for (size_t i = kept.size(); known && i < given; i++)
                if (known->reads[i] && !slots[i].defined()) slots[i] = zeros(entry->paths[1]->made[i - kept.size()]);
            if (known && execute(known->plan, slots, shared)) {
                variable_list out(wanted.size());
                for (size_t i = 0; i < out.size(); i++)
                    if (known->returns[i] >= 0) out[i] = slots[known->returns[i]];  // several inputs may share one
                return out;
            }
            slots.resize(given);
        }
        return slowly(slots, wanted);
    }

    /* What can be made plain by a copy, as an expanded cotangent is; else as it was. */
    static void condense(Tensor& t, Shared& shared) {
        const bool usual = !(t.key_set().raw_repr() & ~USUAL.raw_repr()) && t.layout() == at::kStrided;
        if (!usual || t.is_contiguous() || (shared.index < 0 ? !t.is_cpu() : t.get_device() != shared.index)) return;
        Below below;
        t = t.contiguous();
        shared.copies.fetch_add(1, std::memory_order_relaxed);
    }

    /* For a cotangent that nobody gave. */
    Tensor zeros(const Fresh& like) const {
        Below below;
        return allocate(like, entry->shared->index).zero_();
    }

    /* No cotangents at all, create_graph, failures: what runtime/functions.py does. */
    variable_list slowly(const std::vector<Tensor>& slots, const std::vector<bool>& wanted) {
        pybind11::gil_scoped_acquire gil;
        pybind11::tuple mask(wanted.size()), kept(saved.size()), cotangents(slots.size() - saved.size());
        for (size_t i = 0; i < wanted.size(); i++) mask[i] = pybind11::bool_(wanted[i]);
        for (size_t i = 0; i < slots.size(); i++) {
            PyObject* item = slots[i].defined() ? THPVariable_Wrap(slots[i]) : Py_NewRef(Py_None);
            if (!item) throw python_error();
            auto made = pybind11::reinterpret_steal<pybind11::object>(item);
            if (i < saved.size())
                kept[i] = made;
            else
                cotangents[i - saved.size()] = made;
        }
        PyObject* found = PyObject_CallFunctionObjArgs(entry->shared->gradients.object, entry->dims.object, mask.ptr(),
                                                       kept.ptr(), cotangents.ptr(), nullptr);
        if (!found) {
            python_error error;
            error.persist();
            throw std::move(error);
        }
        auto rows = pybind11::reinterpret_steal<pybind11::sequence>(found);
        variable_list out(wanted.size());
        for (size_t i = 0; i < out.size(); i++) {
            pybind11::object item = rows[i];
            if (!item.is_none()) out[i] = THPVariable_Unpack(item.ptr());
        }
        return out;
    }
};

/* torch 2.11 shares nodes by std::shared_ptr, later ones by an intrusive pointer. */
template <class P>
struct Pointer;
template <>
struct Pointer<std::shared_ptr<Node>> {
    template <class T>
    static std::shared_ptr<T> own(T* node) {
        return std::shared_ptr<T>(node, [](T* n) { deleteNode(n); });
    }
};
template <>
struct Pointer<c10::intrusive_ptr<Node>> {
    template <class T>
    static c10::intrusive_ptr<T> own(T* node) {
        return c10::intrusive_ptr<T>::unsafe_steal_from_new(node);
    }
};
using NodePointer = decltype(torch::autograd::Edge::function);

void connect(const std::shared_ptr<Entry>& entry, const Path& path, const std::vector<Tensor>& slots, size_t inputs) {
    edge_list edges;
    edges.reserve(inputs);
    for (size_t i = 0; i < inputs; i++) edges.push_back(torch::autograd::impl::gradient_edge(slots[i]));
    auto node = Pointer<NodePointer>::own(new EsperBackward(entry, std::move(edges)));
    NodePointer base = node;
    for (int64_t i : path.outputs) {
        if (torch::autograd::isDifferentiableType(slots[i].scalar_type()))
            torch::autograd::set_history(slots[i], base);
        else
            node->add_input_metadata(Node::undefined_input());
    }
    node->saved.reserve(path.saved.size());
    for (int64_t i : path.saved) {
        bool output = std::find(path.outputs.begin(), path.outputs.end(), i) != path.outputs.end();
        node->saved.emplace_back(slots[i], output);
    }
}

/* -- forward -------------------------------------------------------------------------------------------------- */

Block* block_of(PyObject* capsule) {
    auto* block = (Block*)PyCapsule_GetPointer(capsule, NAME);
    if (!block) throw python_error();
    return block;
}

/* Unpacks and looks at every tensor; false: not the common case. */
bool take(const Shared& shared, PyObject* list, std::vector<Tensor>& slots, Key& key, bool& asked) {
    const size_t n = shared.dtypes.size();
    if (!PyList_Check(list) || (size_t)PyList_GET_SIZE(list) != n) return false;
    for (size_t i = 0; i < n; i++) {
        PyObject* item = PyList_GET_ITEM(list, i);
        bool known = false;
        for (PyTypeObject* c : shared.classes) known |= Py_TYPE(item) == c;
        if (!known) return false;
        const Tensor& t = THPVariable_Unpack(item);
        if (!plain(t, shared.dtypes[i], shared.index)) return false;
        asked |= t.requires_grad();
        key.push_back(t.dim());
        for (int64_t size : t.sizes()) key.push_back(size);
        slots.push_back(t);
    }
    return true;
}

bool elsewhere(int64_t index) {
    return index >= 0 && c10::impl::getDeviceGuardImpl(at::kCUDA)->getDevice().index() != index;
}

PyObject* wrapped(const Path& path, std::vector<Tensor>& slots) {
    if (path.outputs.size() == 1) return THPVariable_Wrap(slots[path.outputs[0]]);
    PyObject* out = PyTuple_New(path.outputs.size());
    for (size_t i = 0; out && i < path.outputs.size(); i++) {
        PyObject* item = THPVariable_Wrap(slots[path.outputs[i]]);
        if (item)
            PyTuple_SET_ITEM(out, i, item);
        else
            Py_CLEAR(out);
    }
    return out;
}

PyObject* call(PyObject*, PyObject* const* args, Py_ssize_t n) {
    HANDLE_TH_ERRORS
    TORCH_CHECK_TYPE(n == 2, "call(block or None, tensors: list)");
    if (args[0] == Py_None) Py_RETURN_NONE;
    Block* block = block_of(args[0]);
    const auto shared = block->shared;
    std::vector<Tensor> slots;
    slots.reserve(shared->dtypes.size() + 8);
    static thread_local Key key;
    key.clear();
    bool asked = false;
    if (!take(*shared, args[1], slots, key, asked) || elsewhere(shared->index)) Py_RETURN_NONE;
    asked = asked && at::GradMode::is_enabled() && !c10::InferenceMode::is_enabled();
    std::shared_ptr<Entry> entry = block->last;
    if (!entry || key != block->last_key) {
        auto found = block->entries.find(key);
        if (found == block->entries.end()) Py_RETURN_NONE;
        block->last = entry = found->second;
        block->last_key = key;
    }
    const Path* path = entry->paths[asked].get();
    if (!path) Py_RETURN_NONE;
    auto others_may_run = std::make_optional<pybind11::gil_scoped_release>();
    const bool done = execute(path->plan, slots, *shared);
    others_may_run.reset();
    if (!done) Py_RETURN_NONE;
    if (asked) connect(entry, *path, slots, shared->dtypes.size());
    return wrapped(*path, slots);
    END_HANDLE_TH_ERRORS
}

PyObject* learn(PyObject*, PyObject* args) {
    HANDLE_TH_ERRORS
    PyObject *capsule, *shapes, *dims, *parts, *fresh, *outputs, *saved;
    int asked;
    if (!PyArg_ParseTuple(args, "OOpOOOOO", &capsule, &shapes, &asked, &dims, &parts, &fresh, &outputs, &saved))
        return nullptr;
    Block* block = block_of(capsule);
    const int64_t inputs = (int64_t)block->shared->dtypes.size();
    auto plan = read_plan(parts, fresh, (size_t)inputs);
    if (!plan) Py_RETURN_FALSE;
    auto path = std::make_unique<Path>();
    path->plan = std::move(*plan);
    path->outputs = integers(outputs);
    path->saved = integers(saved);
    // A result that is an input's own memory would need a view of it, and a mask has 64 bits.
    for (int64_t i : path->outputs)
        if (i < inputs) Py_RETURN_FALSE;
    if (inputs > 64) Py_RETURN_FALSE;
    Key key;
    std::vector<Fresh> known;
    for (pybind11::handle shape : pybind11::reinterpret_borrow<pybind11::sequence>(shapes)) {
        auto sizes = integers(shape);
        known.push_back({sizes, {}, block->shared->dtypes.at(known.size())});
        key.push_back((int64_t)sizes.size());
        key.insert(key.end(), sizes.begin(), sizes.end());
    }
    known.insert(known.end(), path->plan.fresh.begin(), path->plan.fresh.end());
    for (int64_t i : path->saved) path->kept.push_back(known.at(i));
    for (int64_t i : path->outputs) path->made.push_back(known.at(i));
    if (block->entries.size() >= LIMIT) block->entries.clear();
    auto& entry = block->entries[key];
    if (!entry) {
        entry = std::make_shared<Entry>();
        entry->shared = block->shared;
        entry->dims = Held(dims);
    }
    if (!entry->paths[asked]) entry->paths[asked] = std::move(path);
    Py_RETURN_TRUE;
    END_HANDLE_TH_ERRORS
}

void destroy(PyObject* capsule) { delete (Block*)PyCapsule_GetPointer(capsule, NAME); }

PyObject* make(PyObject*, PyObject* args) {
    HANDLE_TH_ERRORS
    PyObject *dtypes, *classes, *gradients;
    long long index;
    if (!PyArg_ParseTuple(args, "OOLO", &dtypes, &classes, &index, &gradients)) return nullptr;
    auto block = std::make_unique<Block>();
    Shared& shared = *block->shared;
    for (pybind11::handle item : pybind11::reinterpret_borrow<pybind11::sequence>(dtypes)) {
        TORCH_CHECK_TYPE(THPDtype_Check(item.ptr()), "dtypes must be torch.dtype");
        shared.dtypes.push_back(((THPDtype*)item.ptr())->scalar_type);
    }
    for (pybind11::handle item : pybind11::reinterpret_borrow<pybind11::sequence>(classes))
        shared.classes.push_back((PyTypeObject*)item.ptr());
    shared.class_owner = Held(classes);
    shared.gradients = Held(gradients);
    shared.title = pybind11::handle(gradients).attr("title").cast<std::string>();
    shared.index = index;
    PyObject* capsule = PyCapsule_New(block.get(), NAME, destroy);
    if (capsule) block.release();
    return capsule;
    END_HANDLE_TH_ERRORS
}

PyObject* launches(PyObject*, PyObject* capsule) {
    HANDLE_TH_ERRORS
    return PyLong_FromLongLong(block_of(capsule)->shared->launches.load(std::memory_order_relaxed));
    END_HANDLE_TH_ERRORS
}

PyObject* copies(PyObject*, PyObject* capsule) {
    HANDLE_TH_ERRORS
    return PyLong_FromLongLong(block_of(capsule)->shared->copies.load(std::memory_order_relaxed));
    END_HANDLE_TH_ERRORS
}

/* One library call on tensors that stand in the order of its slots: what tests compare with Python's. */
PyObject* perform_one(PyObject*, PyObject* args) {
    HANDLE_TH_ERRORS
    PyObject *described, *list;
    if (!PyArg_ParseTuple(args, "OO!", &described, &PyList_Type, &list)) return nullptr;
    auto call = read_call(described);
    if (!call) Py_RETURN_NONE;
    std::vector<Tensor> slots;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); i++) slots.push_back(THPVariable_Unpack(PyList_GET_ITEM(list, i)));
    Below below;
    if (!perform(*call, slots, {}, slots.size(), slots.at(0).is_cpu() ? -1 : slots[0].get_device())) Py_RETURN_NONE;
    pybind11::list out;
    for (const Tensor& t : slots) out.append(pybind11::reinterpret_steal<pybind11::object>(THPVariable_Wrap(t)));
    return out.release().ptr();
    END_HANDLE_TH_ERRORS
}

/* -- a plan by itself: what runtime.executor.Ready does in Python ---------------------------------------------- */

struct Alone {
    Plan plan;
    Shared shared;
    size_t given;
};

constexpr const char* ALONE = "runtime._node.plan";

PyObject* prepare(PyObject*, PyObject* args) {
    HANDLE_TH_ERRORS
    PyObject *parts, *fresh;
    long long given, index;
    if (!PyArg_ParseTuple(args, "OOLL", &parts, &fresh, &given, &index)) return nullptr;
    auto plan = read_plan(parts, fresh, (size_t)given);
    if (!plan) Py_RETURN_NONE;
    auto alone = std::make_unique<Alone>();
    alone->plan = std::move(*plan);
    alone->shared.index = index;
    alone->given = (size_t)given;
    PyObject* capsule = PyCapsule_New(alone.get(), ALONE, [](PyObject* c) {
        delete (Alone*)PyCapsule_GetPointer(c, ALONE);
    });
    if (capsule) alone.release();
    return capsule;
    END_HANDLE_TH_ERRORS
}

/* Whether the list holds what a plan may be run on: tensors that are their memory, and integers where nothing reads. */
bool unpack(PyObject* list, const Alone& alone, std::vector<Tensor>& slots) {
    if (!PyList_Check(list) || (size_t)PyList_GET_SIZE(list) != alone.given) return false;
    slots.reserve(alone.given + alone.plan.fresh.size());
    for (size_t i = 0; i < alone.given; i++) {
        PyObject* item = PyList_GET_ITEM(list, (Py_ssize_t)i);
        if (PyLong_Check(item)) {
            if (touched(alone.plan, (int64_t)i)) return false;
            slots.emplace_back();
            continue;
        }
        if (!THPVariable_Check(item)) return false;
        const Tensor& t = THPVariable_Unpack(item);
        if (!plain(t, t.scalar_type(), alone.shared.index)) return false;
        slots.push_back(t);
    }
    return true;
}

PyObject* execute_alone(PyObject*, PyObject* const* args, Py_ssize_t n) {
    HANDLE_TH_ERRORS
    TORCH_CHECK_TYPE(n == 2, "execute(plan, slots: list)");
    auto* alone = (Alone*)PyCapsule_GetPointer(args[0], ALONE);
    if (!alone) return nullptr;
    std::vector<Tensor> slots;
    if (!unpack(args[1], *alone, slots) || elsewhere(alone->shared.index)) Py_RETURN_FALSE;
    bool done;
    {
        pybind11::gil_scoped_release others_may_run;
        done = execute(alone->plan, slots, alone->shared);
    }
    for (size_t i = alone->given; done && i < slots.size(); i++) {
        auto item = pybind11::reinterpret_steal<pybind11::object>(
            slots[i].defined() ? THPVariable_Wrap(slots[i]) : Py_NewRef(Py_None));
        if (!item || PyList_Append(args[1], item.ptr())) return nullptr;
    }
    return PyBool_FromLong(done);
    END_HANDLE_TH_ERRORS
}

PyMethodDef methods[] = {
    {"block", make, METH_VARARGS, "what one block gives to its calls"},
    {"learn", learn, METH_VARARGS, "a plan for calls of these shapes"},
    {"call", (PyCFunction)(void (*)(void))call, METH_FASTCALL, "the result, or None"},
    {"perform", perform_one, METH_VARARGS, "one library call"},
    {"launches", launches, METH_O, "kernels launched and calls made so far"},
    {"copies", copies, METH_O, "copies made so far of cotangents that were not dense"},
    {"prepare", prepare, METH_VARARGS, "a plan by itself, or None"},
    {"execute", (PyCFunction)(void (*)(void))execute_alone, METH_FASTCALL, "runs it; False: only Python can"},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "_node", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace esper

PyMODINIT_FUNC PyInit__node(void) {
    PyObject* made = PyModule_Create(&esper::module);
    if (made && PyModule_AddIntConstant(made, "FORMAT", esper::FORMAT)) Py_CLEAR(made);
    return made;
}
