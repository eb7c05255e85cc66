/* Library calls of a plan through torch's dispatcher, below autograd and autocast, without the interpreter: what
 * runtime/externs.py, calls.py and lookups.py do. A plan with a call that is not in `TABLE` is run by those.
 *
 * A call either writes into `outs` or gives results of its own (`made`), which then take their slots or are copied.
 */
#pragma once
#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/_scaled_dot_product_cudnn_attention.h>
#include <ATen/ops/_scaled_dot_product_cudnn_attention_backward.h>
#include <ATen/ops/_scaled_dot_product_efficient_attention.h>
#include <ATen/ops/_scaled_dot_product_efficient_attention_backward.h>
#include <ATen/ops/_scaled_dot_product_flash_attention.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_backward.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/adaptive_max_pool2d.h>
#include <ATen/ops/adaptive_max_pool2d_backward.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/avg_pool2d.h>
#include <ATen/ops/avg_pool2d_backward.h>
#include <ATen/ops/avg_pool3d.h>
#include <ATen/ops/avg_pool3d_backward.h>
#include <ATen/ops/baddbmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/cumsum.h>
#include <ATen/ops/embedding_dense_backward.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/gather.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/max_pool2d_with_indices.h>
#include <ATen/ops/max_pool2d_with_indices_backward.h>
#include <ATen/ops/max_pool3d_with_indices.h>
#include <ATen/ops/max_pool3d_with_indices_backward.h>
#include <ATen/ops/mkldnn_convolution.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/prod.h>
#include <ATen/ops/sort.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

#include "_torch.h"

namespace esper {

using Tensors = c10::SmallVector<Tensor, 6>;
using Run = std::function<bool(const Tensors& inputs, const Tensors& outs, Tensors& made)>;
using Numbers = std::vector<int64_t>;

/* JSON scalars; several numbers are one string, joined by commas. */
struct __attribute__((visibility("hidden"))) Attrs {
    pybind11::dict dict;

    bool has(const char* name) const { return dict.contains(name) && !dict[name].is_none(); }
    bool truth(const char* name) const { return has(name) && dict[name].cast<bool>(); }
    int64_t number(const char* name) const { return dict[name].cast<int64_t>(); }
    double real(const char* name) const { return dict[name].cast<double>(); }
    std::string text(const char* name) const { return has(name) ? dict[name].cast<std::string>() : ""; }

    at::Scalar scalar(const char* name) const {  // 1 where it is not given
        if (!has(name)) return at::Scalar((int64_t)1);
        return PyFloat_Check(pybind11::object(dict[name]).ptr()) ? at::Scalar(real(name)) : at::Scalar(number(name));
    }

    Numbers numbers(const char* name) const {  // 1 where it is not given
        std::string all = has(name) ? pybind11::str(pybind11::object(dict[name])).cast<std::string>() : "1";
        Numbers out;
        for (size_t at = 0, end; at < all.size(); at = end + 1) {
            end = std::min(all.find(',', at), all.size());
            if (end > at) out.push_back(std::stoll(all.substr(at, end - at)));
        }
        return out;
    }
};

struct View {
    int64_t slot;
    Numbers sizes, strides;
    bool whole;

    Tensor of(const Tensor& t) const { return whole ? t : seen_as(t, sizes, strides); }
};

enum Flag { ANY, MATMUL, CONVOLUTION };

struct Call {
    Run run;
    bool makes = true;    // results of its own, which may take the place of memory that was set aside
    bool shaped = false;  // reads the shape and strides of what it gives
    Flag flag = ANY;      // which of torch's switches changes its meaning
    bool tf32 = false;
    std::vector<View> inputs, outs;
    bool pair = false;  // two calls of the plan in one
    std::shared_ptr<std::atomic<bool>> odd = std::make_shared<std::atomic<bool>>(false);  // not to be tried again
};

using Make = Call (*)(const Attrs&);

/* How a call is made, and the attributes that it understands. */
struct Known {
    Make make;
    std::vector<std::string> attrs;
    Make wide = nullptr;  // for float32 in the place of 16-bit operands
};

/* -- 16-bit numbers on a processor that has no instructions for them, as `runtime/widening.py` says */

inline bool asked(const char* name) {
    auto found = c10::Dispatcher::singleton().findSchema({name, ""});
    return found && found->typed<bool()>().call();
}

inline bool brief(const Tensor& t) { return t.scalar_type() == at::kBFloat16 || t.scalar_type() == at::kHalf; }

inline bool slow(const Tensor& t) {
    static const bool whole = !asked("mkldnn::_is_mkldnn_bf16_supported"), half = !asked("mkldnn::_is_mkldnn_fp16_supported");
    return t.is_cpu() && brief(t) && (t.scalar_type() == at::kBFloat16 ? whole : half);
}

constexpr int64_t FEW = 4;

inline bool quick(const Tensor& a, const Tensor& b) {
    return std::min(a.size(-2), b.size(-1)) <= FEW && a.stride(-1) == 1 && b.stride(-2) == 1;
}

inline Tensor room(const Tensor& t) { return on_huge_pages(at::empty_like(t, t.options().dtype(at::kFloat))); }

inline Run widened(Run run, Run instead, bool product) {
    return [run = std::move(run), instead = std::move(instead), product](const Tensors& in, const Tensors& outs, Tensors& made) {
        if (!slow(in[0]) || (product && quick(in[in.size() - 2], in.back()))) return run(in, outs, made);
        Tensors wide, lent;
        for (const Tensor& t : in) wide.push_back(brief(t) ? room(t).copy_(t) : t);
        for (const Tensor& t : outs) lent.push_back(t.defined() && brief(t) ? room(t) : t);
        if (!instead(wide, lent, made)) return false;
        for (size_t i = 0; i < outs.size() && made.empty(); i++)
            if (!lent[i].is_same(outs[i])) outs[i].copy_(lent[i]);
        return true;  // who called rounds what is wider than its place
    };
}

/* -- order of axes: NHWC tensors seen as NCHW are torch's channels-last memory */

inline Tensor turned(const Tensor& t, bool last, bool back) {
    if (!last) return t;
    auto s = t.sizes(), d = t.strides();
    if (back) return seen_as(t, {s[0], s[2], s[3], s[1]}, {d[0], d[2], d[3], d[1]});
    return seen_as(t, {s[0], s[3], s[1], s[2]}, {d[0], d[3], d[1], d[2]});
}

inline bool channels_last(const Attrs& a) { return a.text("data_format") == "NHWC"; }

/* -- products */

inline Call product(Run run, const Attrs& a) {
    return {std::move(run), false, true, MATMUL, a.text("precision") == "tf32", {}, {}};
}

inline Call mm(const Attrs& a) {
    return product(
        [](const Tensors& in, const Tensors& outs, Tensors&) {
            Tensor out = outs[0];
            if (out.scalar_type() == in[0].scalar_type())
                at::mm_out(out, in[0], in[1]);
            else if (out.is_cuda())
                at::mm_out(out, in[0], in[1], out.scalar_type());
            else
                at::mm_out(out, in[0].to(out.scalar_type()), in[1].to(out.scalar_type()));
            return true;
        },
        a);
}

inline Call addmm(const Attrs& a) {
    return product(
        [beta = a.scalar("beta"), alpha = a.scalar("alpha")](const Tensors& in, const Tensors& outs, Tensors&) {
            Tensor out = outs[0];
            at::addmm_out(out, in[0], in[1], in[2], beta, alpha);
            return true;
        },
        a);
}

inline Call bmm(const Attrs& a) {
    return product(
        [](const Tensors& in, const Tensors& outs, Tensors&) {
            Tensor out = outs[0];
            at::bmm_out(out, in[0], in[1]);
            return true;
        },
        a);
}

inline Call baddbmm(const Attrs& a) {
    return product(
        [beta = a.scalar("beta"), alpha = a.scalar("alpha")](const Tensors& in, const Tensors& outs, Tensors&) {
            Tensor out = outs[0];
            at::baddbmm_out(out, in[0], in[1], in[2], beta, alpha);
            return true;
        },
        a);
}

/* -- convolution */

struct Geometry {
    Numbers stride, padding, dilation, none;
    int64_t groups;
    bool last;
    explicit Geometry(const Attrs& a)
        : stride(a.numbers("stride")), padding(a.numbers("padding")), dilation(a.numbers("dilation")),
          none(stride.size(), 0), groups(a.number("groups")), last(channels_last(a)) {}
};

inline Call convolution(const Attrs& a) {
    Run run = [g = Geometry(a)](const Tensors& in, const Tensors&, Tensors& made) {
        std::optional<Tensor> bias = in.size() > 2 ? std::make_optional(in[2]) : std::nullopt;
        made.push_back(turned(at::convolution(turned(in[0], g.last, false), turned(in[1], g.last, false), bias, g.stride,
                                              g.padding, g.dilation, false, g.none, g.groups),
                              g.last, true));
        return true;
    };
    return {std::move(run), true, false, CONVOLUTION, a.text("precision") == "tf32", {}, {}};
}

/* 0: of the input, 1: of the weight. What is asked for lends its shape in place of the operand that is not read. */
template <int which>
inline Call convolution_gradient(const Attrs& a) {
    Run run = [g = Geometry(a)](const Tensors& in, const Tensors& outs, Tensors& made) {
        Tensor flow = turned(in[0], g.last, false), other = turned(in[1], g.last, false);
        Tensor own = turned(outs[0], g.last, false);
        auto both = at::convolution_backward(flow, which == 0 ? own : other, which == 0 ? other : own, std::nullopt,
                                             g.stride, g.padding, g.dilation, false, g.none, g.groups,
                                             {which == 0, which == 1, false});
        made.push_back(turned(which == 0 ? std::get<0>(both) : std::get<1>(both), g.last, true));
        return true;
    };
    return {std::move(run), true, true, CONVOLUTION, a.text("precision") == "tf32", {}, {}};
}

/* Both, of (cotangent, weight, input), where a plan asks for one after the other. */
inline Call convolution_gradients(const Attrs& a) {
    Run run = [g = Geometry(a)](const Tensors& in, const Tensors&, Tensors& made) {
        Tensor flow = turned(in[0], g.last, false), w = turned(in[1], g.last, false), x = turned(in[2], g.last, false);
        auto both = at::convolution_backward(flow, x, w, std::nullopt, g.stride, g.padding, g.dilation, false, g.none,
                                             g.groups, {true, true, false});
        made.push_back(turned(std::get<0>(both), g.last, true));
        made.push_back(turned(std::get<1>(both), g.last, true));
        return true;
    };
    return {std::move(run), true, false, CONVOLUTION, a.text("precision") == "tf32", {}, {}};
}

/* -- the same of float32 in the place of 16-bit numbers. Zeros around an input are written out: they count where a
 * weight is infinite, as they do in torch's own loops. */

inline Tensor bordered(const Tensor& x, const Numbers& padding) {
    Numbers around;
    for (size_t i = padding.size(); i-- > 0;) around.insert(around.end(), 2, padding[i]);
    const bool any = std::any_of(around.begin(), around.end(), [](int64_t n) { return n != 0; });
    return any ? at::constant_pad_nd(x, around, 0) : x;
}

/* By oneDNN: for few images torch may take a transform, in which an infinity spreads. */
inline Call wide_convolution(const Attrs& a) {
    Run run = [g = Geometry(a), whole = convolution(a).run](const Tensors& in, const Tensors& outs, Tensors& made) {
        if (!in[0].numel() || !at::hasMKLDNN()) return whole(in, outs, made);
        std::optional<Tensor> bias = in.size() > 2 ? std::make_optional(in[2]) : std::nullopt;
        Tensor x = bordered(turned(in[0], g.last, false), g.padding), w = turned(in[1], g.last, false);
        made.push_back(turned(at::mkldnn_convolution(x, w, bias, g.none, g.stride, g.dilation, g.groups), g.last, true));
        return true;
    };
    return {std::move(run)};
}

inline Call wide_weight_gradient(const Attrs& a) {
    Run run = [g = Geometry(a)](const Tensors& in, const Tensors& outs, Tensors& made) {
        Tensor flow = turned(in[0], g.last, false), x = bordered(turned(in[1], g.last, false), g.padding);
        auto both = at::convolution_backward(flow, x, turned(outs[0], g.last, false), std::nullopt, g.stride, g.none,
                                             g.dilation, false, g.none, g.groups, {false, true, false});
        made.push_back(turned(std::get<1>(both), g.last, true));
        return true;
    };
    return {std::move(run)};
}

/* Both, of (cotangent, weight, input): one after the other, as they are alone. */
inline Run wide_gradients(const Attrs& a) {
    return [one = convolution_gradient<0>(a).run, two = wide_weight_gradient(a).run](const Tensors& in, const Tensors&,
                                                                                    Tensors& made) {
        return one({in[0], in[1]}, {in[2]}, made) && two({in[0], in[2]}, {in[1]}, made);
    };
}

/* -- attention: torch's kernel is chosen as torch does, once per plan; by formulas (MATH) in Python only */

enum Kind { UNKNOWN = -1, MATH = 0, FLASH = 1, EFFICIENT = 2, CUDNN = 3 };

struct Attention {
    bool causal;
    double scale;
    std::atomic<int> kind{UNKNOWN};
    std::once_flag once;
    Tensor seed;  // torch's kernels read none without dropout

    explicit Attention(const Attrs& a) : causal(a.truth("is_causal")), scale(a.real("scale")) {}

    int choice(const Tensor& q, const Tensor& k, const Tensor& v) {
        int found = kind.load(std::memory_order_relaxed);
        if (found == UNKNOWN) kind.store(found = choose(q, k, v), std::memory_order_relaxed);
        return found;
    }

    int choose(const Tensor& q, const Tensor& k, const Tensor& v) const {
        if (!q.numel() || !k.numel() || q.scalar_type() == at::kDouble) return MATH;
        bool alike = q.size(-1) == k.size(-1) && q.size(-1) == v.size(-1);
        if (q.is_cpu()) return alike ? FLASH : MATH;
        int found = (int)at::_fused_sdp_choice(q, k, v, std::nullopt, 0.0, causal, scale);
        return found >= FLASH && found <= CUDNN && alike && q.size(-1) % 8 == 0 ? found : MATH;
    }

    const Tensor& no_seed(const Tensor& like) {
        std::call_once(once, [&] { seed = allocate({{}, {}, at::kLong}, like.get_device()); });
        return seed;
    }

    bool forward(const Tensors& in, const Tensors& outs, Tensors& made) {
        const Tensor &q = in[0], &k = in[1], &v = in[2];
        const int found = choice(q, k, v);
        const bool wanted = outs.size() > 1;
        Tensor out, lse;
        if (found == MATH) return false;
        if (q.is_cpu()) {
            std::tie(out, lse) =
                at::_scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, std::nullopt, scale);
        } else if (found == FLASH) {
            auto all = at::_scaled_dot_product_flash_attention(q, k, v, 0.0, causal, false, scale);
            out = std::get<0>(all), lse = std::get<1>(all);
        } else if (found == EFFICIENT) {
            auto all =
                at::_scaled_dot_product_efficient_attention(q, k, v, std::nullopt, wanted, 0.0, causal, scale);
            out = std::get<0>(all), lse = std::get<1>(all);
        } else {
            auto all =
                at::_scaled_dot_product_cudnn_attention(q, k, v, std::nullopt, wanted, 0.0, causal, false, scale);
            out = std::get<0>(all), lse = std::get<1>(all);
        }
        made.push_back(out);
        if (!wanted) return true;
        if (lse.dim() == 4) lse = lse.squeeze(-1);
        made.push_back(lse.size(-1) == q.size(-2) ? lse : lse.narrow(-1, 0, q.size(-2)));
        return true;
    }

    bool backward(const Tensors& in, const Tensors&, Tensors& made) {
        const Tensor &g = in[0], &q = in[1], &k = in[2], &v = in[3], &out = in[4], &lse = in[5];
        const int found = choice(q, k, v);
        const int64_t rows = q.size(-2), keys = k.size(-2);
        if (found == MATH) return false;
        Tensor dq, dk, dv;
        if (q.is_cpu()) {
            std::tie(dq, dk, dv) = at::_scaled_dot_product_flash_attention_for_cpu_backward(
                g, q, k, v, out, lse.transpose(1, 2).contiguous().transpose(1, 2), 0.0, causal, std::nullopt, scale);
        } else if (found == FLASH) {
            const Tensor& s = no_seed(q);
            std::tie(dq, dk, dv) = at::_scaled_dot_product_flash_attention_backward(
                g, q, k, v, out, lse, {}, {}, rows, keys, 0.0, causal, s, s, scale);
        } else if (found == CUDNN) {
            const Tensor& s = no_seed(q);
            std::tie(dq, dk, dv) = at::_scaled_dot_product_cudnn_attention_backward(
                g, q, k, v, out, lse.unsqueeze(-1), s, s, {}, {}, {}, rows, keys, 0.0, causal, scale);
        } else {
            const Tensor& s = no_seed(q);
            const int64_t missing = (32 - rows % 32) % 32;
            auto all = at::_scaled_dot_product_efficient_attention_backward(
                g, q, k, v, {}, out, missing ? at::constant_pad_nd(lse, {0, missing}) : lse, s, s, 0.0,
                {true, true, true, false}, causal, scale);
            dq = std::get<0>(all), dk = std::get<1>(all), dv = std::get<2>(all);
        }
        made.assign({dq, dk, dv});
        return true;
    }
};

/* `layout` BSHD: operands and results with heads and rows exchanged, all but `lse`. */
inline Tensors exchanged(const Tensors& all) {
    Tensors out;
    for (const Tensor& t : all) {
        const bool four = t.defined() && t.dim() == 4;
        auto s = four ? t.sizes() : at::IntArrayRef(), d = four ? t.strides() : at::IntArrayRef();
        out.push_back(four ? seen_as(t, {s[0], s[2], s[1], s[3]}, {d[0], d[2], d[1], d[3]}) : t);
    }
    return out;
}

inline Call attending(const Attrs& a, bool (Attention::*run)(const Tensors&, const Tensors&, Tensors&)) {
    auto held = std::make_shared<Attention>(a);
    if (a.text("layout") != "BSHD")
        return {[=](const Tensors& in, const Tensors& outs, Tensors& made) { return ((*held).*run)(in, outs, made); }};
    return {[=](const Tensors& in, const Tensors& outs, Tensors& made) {
        Tensors found;
        if (!((*held).*run)(exchanged(in), outs, found)) return false;
        made = exchanged(found);
        return true;
    }};
}

inline Call attention(const Attrs& a) { return attending(a, &Attention::forward); }
inline Call attention_gradient(const Attrs& a) { return attending(a, &Attention::backward); }

/* -- pooling */

struct Window {
    Numbers kernel, stride, padding, dilation;
    bool ceil, counted, last;
    std::optional<int64_t> divisor;
    explicit Window(const Attrs& a)
        : kernel(a.numbers("kernel")), stride(a.numbers("stride")), padding(a.numbers("padding")),
          dilation(a.numbers("dilation")), ceil(a.truth("ceil_mode")), counted(a.truth("count_include_pad")),
          last(channels_last(a)) {
        if (a.has("divisor_override")) divisor = a.number("divisor_override");
    }
};

template <auto pool>
inline Call max_pool(const Attrs& a) {
    return {[w = Window(a)](const Tensors& in, const Tensors&, Tensors& made) {
        auto both = pool(turned(in[0], w.last, false), w.kernel, w.stride, w.padding, w.dilation, w.ceil);
        made.assign({turned(std::get<0>(both), w.last, true), turned(std::get<1>(both), w.last, true)});
        return true;
    }};
}

template <auto gradient>
inline Call max_pool_gradient(const Attrs& a) {
    return {[w = Window(a)](const Tensors& in, const Tensors&, Tensors& made) {
        made.push_back(turned(gradient(turned(in[0], w.last, false), turned(in[1], w.last, false), w.kernel, w.stride,
                                       w.padding, w.dilation, w.ceil, turned(in[2], w.last, false)),
                              w.last, true));
        return true;
    }};
}

/* torch has no three-dimensional mean of 16-bit numbers on the CPU. */
inline Tensor widened(const Tensor& t, int rank) {
    return rank == 3 && t.itemsize() == 2 && t.is_cpu() ? t.to(at::kFloat) : t;
}

template <auto pool, int rank>
inline Call avg_pool(const Attrs& a) {
    return {[w = Window(a)](const Tensors& in, const Tensors&, Tensors& made) {
        Tensor out = pool(widened(turned(in[0], w.last, false), rank), w.kernel, w.stride, w.padding, w.ceil, w.counted,
                          w.divisor);
        made.push_back(turned(out, w.last, true).to(in[0].scalar_type()));
        return true;
    }};
}

/* The operand is not read, but torch's kernel for cards gives other numbers where its memory is channels-last. */
template <auto gradient, int rank>
inline Call avg_pool_gradient(const Attrs& a) {
    Run run = [w = Window(a)](const Tensors& in, const Tensors& outs, Tensors& made) {
        Tensor like = widened(turned(outs[0], w.last, false), rank);
        Tensor out = gradient(widened(turned(in[0], w.last, false), rank), like.is_cuda() ? like.contiguous() : like,
                              w.kernel, w.stride, w.padding, w.ceil, w.counted, w.divisor);
        made.push_back(turned(out, w.last, true).to(in[0].scalar_type()));
        return true;
    };
    return {std::move(run), true, true};
}

inline Call adaptive_max_pool(const Attrs& a) {
    return {[size = a.numbers("output_size")](const Tensors& in, const Tensors&, Tensors& made) {
        auto both = at::adaptive_max_pool2d(in[0], size);
        made.assign({std::get<0>(both), std::get<1>(both)});
        return true;
    }};
}

inline Call adaptive_max_pool_gradient(const Attrs&) {
    return {[](const Tensors& in, const Tensors&, Tensors& made) {
        made.push_back(at::adaptive_max_pool2d_backward(in[0], in[1], in[2]));
        return true;
    }};
}

/* -- rows by number, positions, order */

inline Call written(Run run) { return {std::move(run), false, true}; }

inline Call embedding(const Attrs&) {
    return written([](const Tensors& in, const Tensors& outs, Tensors&) {
        Tensor out = outs[0].view({-1, in[1].size(1)});
        at::index_select_out(out, in[1], 0, in[0].reshape({-1}));
        return true;
    });
}

inline Call embedding_gradient(const Attrs&) {
    Run run = [](const Tensors& in, const Tensors& outs, Tensors& made) {
        made.push_back(at::embedding_dense_backward(in[0], in[1], outs[0].size(0), -1, false));
        return true;
    };
    return {std::move(run), true, true};
}

inline Call cat(const Attrs& a) {
    return written([dim = a.number("dim")](const Tensors& in, const Tensors& outs, Tensors&) {
        Tensor out = outs[0];
        at::cat_out(out, at::TensorList(in.data(), in.size()), dim);
        return true;
    });
}

inline Call gather(const Attrs& a) {
    return written([dim = a.number("dim")](const Tensors& in, const Tensors& outs, Tensors&) {
        Tensor out = outs[0];
        at::gather_out(out, in[0], dim, in[1]);
        return true;
    });
}

inline Call prod(const Attrs&) {
    return written([](const Tensors& in, const Tensors& outs, Tensors&) {
        Tensor out = outs[0];
        at::prod_out(out, in[0], 1);
        return true;
    });
}

inline Call cumsum(const Attrs& a) {
    if (a.truth("reverse")) return {};
    return written([dim = a.number("dim")](const Tensors& in, const Tensors& outs, Tensors&) {
        Tensor out = outs[0];
        at::cumsum_out(out, in[0], dim);
        return true;
    });
}

inline Call sort(const Attrs& a) {
    return {[dim = a.number("dim"), down = a.truth("descending")](const Tensors& in, const Tensors&, Tensors& made) {
        auto both = at::sort(in[0], true, dim, down);
        made.assign({std::get<0>(both), std::get<1>(both)});
        return true;
    }};
}

inline const std::unordered_map<std::string, Known>& table() {
    using Names = std::vector<std::string>;
    static const Names one = {"precision"}, scaled = {"precision", "alpha", "beta"}, along = {"dim"};
    static const Names conv = {"stride", "padding", "dilation", "groups", "data_format", "precision"};
    static const Names attend = {"is_causal", "scale", "layout"};
    static const Names maximal = {"kernel", "stride", "padding", "dilation", "ceil_mode", "data_format"};
    static const Names mean = {"kernel",      "stride",           "padding", "ceil_mode",
                               "data_format", "count_include_pad", "divisor_override"};
    static const std::unordered_map<std::string, Known> TABLE = {
        {"mm", {mm, one, mm}},
        {"addmm", {addmm, scaled, addmm}},
        {"bmm", {bmm, one, bmm}},
        {"baddbmm", {baddbmm, scaled, baddbmm}},
        {"conv2d", {convolution, conv, wide_convolution}},
        {"conv3d", {convolution, conv, wide_convolution}},
        {"conv2d_input_grad", {convolution_gradient<0>, conv, convolution_gradient<0>}},
        {"conv3d_input_grad", {convolution_gradient<0>, conv, convolution_gradient<0>}},
        {"conv2d_weight_grad", {convolution_gradient<1>, conv, wide_weight_gradient}},
        {"conv3d_weight_grad", {convolution_gradient<1>, conv, wide_weight_gradient}},
        {"attention", {attention, attend}},
        {"attention_grad", {attention_gradient, attend, attention_gradient}},
        {"max_pool2d", {max_pool<at::max_pool2d_with_indices>, maximal}},
        {"max_pool3d", {max_pool<at::max_pool3d_with_indices>, maximal}},
        {"max_pool2d_grad", {max_pool_gradient<at::max_pool2d_with_indices_backward>, maximal}},
        {"max_pool3d_grad", {max_pool_gradient<at::max_pool3d_with_indices_backward>, maximal}},
        {"avg_pool2d", {avg_pool<at::avg_pool2d, 2>, mean}},
        {"avg_pool3d", {avg_pool<at::avg_pool3d, 3>, mean}},
        {"avg_pool2d_grad", {avg_pool_gradient<at::avg_pool2d_backward, 2>, mean}},
        {"avg_pool3d_grad", {avg_pool_gradient<at::avg_pool3d_backward, 3>, mean}},
        {"adaptive_max_pool2d", {adaptive_max_pool, {"output_size"}}},
        {"adaptive_max_pool2d_grad", {adaptive_max_pool_gradient, {"output_size"}}},
        {"embedding", {embedding, {}}},
        {"embedding_grad", {embedding_gradient, {}}},
        {"cat", {cat, along}},
        {"gather", {gather, along}},
        {"prod", {prod, {}}},
        {"cumsum", {cumsum, {"dim", "reverse"}}},
        {"sort", {sort, {"dim", "descending"}}},
    };
    return TABLE;
}

/* -- doing it */

/* float32 in products and convolutions on a card multiplied as the step declares, whatever torch's switches say
 * (runtime/precision.py). */
class Declared {
    Flag turned_ = ANY;
    bool tf32_;

    static bool get(Flag flag) {
        if (flag == MATMUL) return at::globalContext().allowTF32CuBLAS();
        return at::globalContext().float32Precision(at::Float32Backend::CUDA, at::Float32Op::CONV) ==
               at::Float32Precision::TF32;
    }
    static void put(Flag flag, bool on) {
        if (flag == MATMUL) return at::globalContext().setAllowTF32CuBLAS(on);
        at::globalContext().setFloat32Precision(at::Float32Backend::CUDA, at::Float32Op::CONV,
                                                on ? at::Float32Precision::TF32 : at::Float32Precision::IEEE);
    }

   public:
    Declared(const Call& call, const Tensor& last) : tf32_(call.tf32) {
        if (call.flag == ANY || last.scalar_type() != at::kFloat || !last.is_cuda() || get(call.flag) == tf32_) return;
        put(call.flag, tf32_);
        turned_ = call.flag;
    }
    ~Declared() {
        if (turned_ != ANY) put(turned_, !tf32_);
    }
};

/* Below autograd and autocast, as for the length of a plan. */
struct Below {
    at::NoGradGuard no_grad;
    at::AutoDispatchBelowADInplaceOrView no_tracking;
    c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
};

/* (name, attributes, inputs, outs), views as (slot, shape, stride, whole); null for what is not here. */
inline std::unique_ptr<Call> read_call(pybind11::handle described) {
    auto row = described.cast<pybind11::tuple>();
    auto known = table().find(row[0].cast<std::string>());
    if (known == table().end()) return nullptr;
    Attrs attrs{row[1].cast<pybind11::dict>()};
    for (auto& item : attrs.dict)  // one that is not understood changes the meaning
        if (std::find(known->second.attrs.begin(), known->second.attrs.end(), item.first.cast<std::string>()) ==
            known->second.attrs.end())
            return nullptr;
    auto call = std::make_unique<Call>(known->second.make(attrs));
    if (!call->run) return nullptr;
    if (known->second.wide)
        call->run = widened(std::move(call->run), known->second.wide(attrs).run, call->flag == MATMUL);
    for (int side = 0; side < 2; side++)
        for (pybind11::handle item : row[2 + side].cast<pybind11::tuple>()) {
            auto view = item.cast<pybind11::tuple>();
            (side ? call->outs : call->inputs)
                .push_back({view[0].cast<int64_t>(), integers(view[1]), integers(view[2]), view[3].cast<bool>()});
        }
    return call;
}

/* The gradients of input and weight of one convolution, one after the other, in one call; null where they are not. */
inline std::unique_ptr<Call> read_pair(pybind11::handle first, pybind11::handle second) {
    if (!PyTuple_Check(first.ptr()) || !PyTuple_Check(second.ptr())) return nullptr;
    auto one = first.cast<pybind11::tuple>(), two = second.cast<pybind11::tuple>();
    auto name = one[0].cast<std::string>(), next = two[0].cast<std::string>();
    if (!(name == "conv2d_input_grad" && next == "conv2d_weight_grad") &&
        !(name == "conv3d_input_grad" && next == "conv3d_weight_grad"))
        return nullptr;
    auto flow = one[2].cast<pybind11::tuple>(), again = two[2].cast<pybind11::tuple>();
    if (!one[1].equal(two[1]) || !flow[0].equal(again[0])) return nullptr;
    auto data = read_call(first), weight = read_call(second);
    if (!data || !weight) return nullptr;
    auto both = std::make_unique<Call>(convolution_gradients(Attrs{one[1].cast<pybind11::dict>()}));
    both->run = widened(both->run, wide_gradients(Attrs{one[1].cast<pybind11::dict>()}), false);
    both->inputs = {data->inputs[0], data->inputs[1], weight->inputs[1]};
    both->outs = {data->outs[0], weight->outs[0]};
    both->pair = true;
    return both;
}

/* Runs one call; results lie in their slots afterwards. `fresh` describes the slots from number `given` on, memory of
 * the plan's own. False: only Python can. */
inline bool perform(const Call& call, std::vector<Tensor>& slots, const std::vector<Fresh>& fresh, size_t given,
                    int64_t index) {
    Tensors inputs, outs, made;
    for (const View& v : call.inputs) inputs.push_back(v.of(slots[v.slot]));
    for (const View& v : call.outs) outs.push_back(slots[v.slot].defined() ? v.of(slots[v.slot]) : Tensor());
    {
        Declared declared(call, inputs.back());
        if (!call.run(inputs, outs, made)) {
            call.odd->store(true, std::memory_order_relaxed);
            return false;
        }
    }
    for (size_t i = 0; i < made.size() && i < outs.size(); i++) {
        const View& v = call.outs[i];
        const Tensor& value = made[i];
        Tensor& slot = slots[v.slot];
        const Fresh* f = (size_t)v.slot >= given ? &fresh[v.slot - given] : nullptr;
        if (f && v.whole && value.is_contiguous() && value.scalar_type() == f->dtype &&
            value.sizes() == at::IntArrayRef(f->sizes)) {
            slot = value;
            continue;
        }
        if (!slot.defined()) slot = allocate(*f, index);
        v.of(slot).copy_(value);
    }
    return true;
}

}  // namespace esper
