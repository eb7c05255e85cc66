"""Scalar functions of the C spelling: conversions and float32 mathematics that gcc vectorises without a
math library.

Each function is one paragraph of C below, written without branches (selections only), so that it can be
inlined into a `#pragma omp simd` loop; fused multiply-adds occur where `fma_f` is written and nowhere else.
Polynomials are minimax fits of relative error (Lawson-weighted least squares, coefficients rounded to
float32). Errors are below 2 ulp on the whole range, denormals included; tests/forge/test_c_math.py measures
them against float64. Double precision uses libm.

Sources: argument reductions after Cody and Waite, "Software Manual for the Elementary Functions" (1980); the
reduction of sine and cosine by a table of 2^k mod 2 pi is exact to 2^-80 for every float32; expm1 as
2^n p(r) + (2^n - 1); erf as 1 - exp(-x + x P(x)) beyond 0.9277.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from fractions import Fraction

HEADER = """\
#include <math.h>
#include <stdint.h>

#define INLINE static inline __attribute__((always_inline))
"""

_CONVERSIONS = """
INLINE float float_of(uint32_t u) { float f; __builtin_memcpy(&f, &u, 4); return f; }

INLINE uint32_t bits_of(float f) { uint32_t u; __builtin_memcpy(&u, &f, 4); return u; }

INLINE double double_of(uint64_t u) { double f; __builtin_memcpy(&f, &u, 8); return f; }

INLINE uint64_t bits_of_d(double f) { uint64_t u; __builtin_memcpy(&u, &f, 8); return u; }

INLINE float from_bf16(uint16_t h) { return float_of((uint32_t)h << 16); }

INLINE float round_bf16(float x)
{
    const uint32_t u = bits_of(x);
    const uint32_t r = (u + 0x7fffu + ((u >> 16) & 1u)) & 0xffff0000u;
    return float_of(x != x ? 0x7fc00000u : r);
}

INLINE uint16_t high_half(float x) { return (uint16_t)(bits_of(x) >> 16); }

INLINE uint16_t to_bf16(float x) { return high_half(round_bf16(x)); }

INLINE float from_f16(uint16_t h)
{
    const uint32_t u = (uint32_t)(h & 0x7fffu) << 13;
    const float f = float_of(u) * 0x1p112f; /* rebias; exact for denormals */
    const uint32_t r = u >= 0x0f800000u ? u | 0x7f800000u : bits_of(f);
    return float_of(r | (uint32_t)(h & 0x8000u) << 16);
}

INLINE uint16_t to_f16(float x)
{
    const uint32_t u = bits_of(x) & 0x7fffffffu;
    const uint32_t small = bits_of(float_of(u) + 0.5f) - 0x3f000000u; /* the adder rounds to 2^-24 */
    const uint32_t normal = (u - 0x38000000u + 0xfffu + ((u >> 13) & 1u)) >> 13;
    uint32_t r = u < 0x38800000u ? small : normal;
    r = u >= 0x477ff000u ? 0x7c00u : r;
    r = u > 0x7f800000u ? 0x7e00u : r;
    return (uint16_t)(r | (bits_of(x) >> 16 & 0x8000u));
}

INLINE float round_f16(float x) { return from_f16(to_f16(x)); }
"""

_FLOAT = """
INLINE float fma_f(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

INLINE float max_f(float a, float b) { return a > b || a != a ? a : b; }

INLINE float min_f(float a, float b) { return a < b || a != a ? a : b; }

INLINE float sign_f(float x) { return (float)((x > 0.0f) - (x < 0.0f)); }

INLINE float rsqrt_f(float x) { return 1.0f / __builtin_sqrtf(x); }

INLINE float power_of_two(uint32_t n) { return float_of((n + 127u) << 23); }

INLINE float exp_reduce(float z, float *r, uint32_t *k)
{
    const float t = fma_f(z, 0x1.715476p+0f, 0x1.8p+23f); /* nearest integer in the low bits */
    const float n = t - 0x1.8p+23f;
    const float f = fma_f(n, 0x1.05c610p-29f, fma_f(n, -0x1.62e430p-1f, z));
    *r = f;
    *k = bits_of(t) - 0x4b400000u;
    float q = 0x1.6a234ep-10f; /* exp(r) = 1 + r + r r Q(r) */
    q = fma_f(q, f, 0x1.123a6cp-7f);
    q = fma_f(q, f, 0x1.5558f4p-5f);
    q = fma_f(q, f, 0x1.555490p-3f);
    return fma_f(q, f, 0x1.fffffcp-2f);
}

INLINE float exp_parts(float z, float *low, uint32_t *k)
{
    float r;
    const float q = exp_reduce(z, &r, k);
    const float a = 1.0f + r;
    const float rest = fma_f(r * r, q, r - (a - 1.0f));
    const float p = a + rest;
    *low = rest - (p - a);
    return p;
}

INLINE float scale(float p, uint32_t k)
{
    const uint32_t half = (uint32_t)((int32_t)k >> 1); /* two steps, so that denormals round once */
    return p * power_of_two(half) * power_of_two(k - half);
}

INLINE float exp_f(float x)
{
    float low, z = x > 89.0f ? 89.0f : x;
    z = z < -104.0f ? -104.0f : z;
    uint32_t k;
    const float p = exp_parts(z, &low, &k);
    return scale(p, k);
}

INLINE float exp_inside(float x)
{
    float r; /* |x| < 87: no overflow, no denormals; one ulp */
    uint32_t k;
    const float q = exp_reduce(x, &r, &k);
    return (1.0f + fma_f(r * r, q, r)) * power_of_two(k);
}

INLINE float exp2_f(float x)
{
    float z = x > 129.0f ? 129.0f : x;
    z = z < -151.0f ? -151.0f : z;
    const float t = z + 0x1.8p+23f;
    const float r = z - (t - 0x1.8p+23f);
    float q = 0x1.41fb2cp-13f;
    q = fma_f(q, r, 0x1.5f3f32p-10f);
    q = fma_f(q, r, 0x1.3b2d50p-7f);
    q = fma_f(q, r, 0x1.c6aee6p-5f);
    q = fma_f(q, r, 0x1.ebfbdcp-3f);
    q = fma_f(q, r, 0x1.62e430p-1f);
    const float p = fma_f(q, r, 1.0f);
    return scale(p, bits_of(t) - 0x4b400000u);
}

INLINE float expm1_f(float x)
{
    float z = x > 89.0f ? 89.0f : x;
    z = z < -30.0f ? -30.0f : z;
    const float t = fma_f(z, 0x1.715476p+0f, 0x1.8p+23f);
    const float n = t - 0x1.8p+23f;
    const float r = fma_f(n, 0x1.05c610p-29f, fma_f(n, -0x1.62e430p-1f, z));
    float q = 0x1.a032c8p-13f;
    q = fma_f(q, r, 0x1.6d7298p-10f);
    q = fma_f(q, r, 0x1.11118ap-7f);
    q = fma_f(q, r, 0x1.5554b0p-5f);
    q = fma_f(q, r, 0x1.555554p-3f);
    q = fma_f(q, r, 0.5f);
    const float p = fma_f(r * r, q, r);
    const float s = power_of_two(bits_of(t) - 0x4b400001u); /* 2^(n-1): n may be 128 */
    const float y = 2.0f * fma_f(s, p, s - 0.5f);
    return __builtin_fabsf(x) < 0x1p-13f ? (x == 0.0f ? x : fma_f(0.5f * x, x, x)) : y;
}

INLINE float log_split(float x, float *e)
{
    const int tiny = x < 0x1p-126f;
    const float y = tiny ? x * 0x1p+23f : x;
    const uint32_t u = bits_of(y) - 0x3f3504f3u; /* mantissa in [sqrt(1/2), sqrt(2)) */
    *e = (float)((int32_t)u >> 23) - (tiny ? 23.0f : 0.0f);
    return float_of((u & 0x7fffffu) + 0x3f3504f3u) - 1.0f;
}

INLINE float log_tail(float f)
{
    float p = 0x1.14573ep-4f; /* log(1 + f) - f = f f (f P(f) - 1/2) */
    p = fma_f(p, f, -0x1.de3bf8p-4f);
    p = fma_f(p, f, 0x1.e6f08cp-4f);
    p = fma_f(p, f, -0x1.fc220ep-4f);
    p = fma_f(p, f, 0x1.233766p-3f);
    p = fma_f(p, f, -0x1.555c4ep-3f);
    p = fma_f(p, f, 0x1.99a4b6p-3f);
    p = fma_f(p, f, -0x1.000006p-2f);
    p = fma_f(p, f, 0x1.555548p-2f);
    return fma_f(f, p, -0.5f);
}

INLINE float log_edge(float x, float y)
{
    const float finite = x < __builtin_inff() ? y : x;
    const float other = x == 0.0f ? -__builtin_inff() : __builtin_nanf("");
    return x > 0.0f ? finite : other;
}

INLINE float log_sum(float e, float f)
{
    const float y = fma_f(f * f, log_tail(f), fma_f(e, -0x1.05c610p-29f, f));
    return e == 0.0f ? y : fma_f(e, 0x1.62e430p-1f, y);
}

INLINE float log_f(float x)
{
    float e;
    const float f = log_split(x, &e);
    return log_edge(x, log_sum(e, f));
}

INLINE float log2_f(float x)
{
    float e;
    const float f = log_split(x, &e);
    const float t = fma_f(f, 0x1.4ae0c0p-26f, f * f * log_tail(f) * 0x1.715476p+0f);
    return log_edge(x, e + fma_f(f, 0x1.715476p+0f, t));
}

INLINE float log1p_f(float x)
{
    const float u = 1.0f + x;
    const float lost = x < 1.0f ? x - (u - 1.0f) : 1.0f - (u - x);
    float e;
    const float m = log_split(u, &e);
    const float scale = e < 127.0f ? float_of((uint32_t)(127 - (int32_t)e) << 23) : 0.0f;
    const float f = e == 0.0f ? x : fma_f(lost, scale, m);
    const float y = log_edge(u, log_sum(e, f));
    return x == 0.0f ? x : y;
}

INLINE float tanh_f(float x)
{
    const float a = __builtin_fabsf(x), z = x * x;
    float p = 0x1.16b066p-9f;
    p = fma_f(p, z, -0x1.0b5f54p-7f);
    p = fma_f(p, z, 0x1.636de6p-6f);
    p = fma_f(p, z, -0x1.b9ebf4p-5f);
    p = fma_f(p, z, 0x1.11105ap-3f);
    p = fma_f(p, z, -0x1.555554p-2f);
    const float small = x == 0.0f ? x : fma_f(x * z, p, x);
    const float b = a > 10.0f ? 10.0f : a; /* one from 9.02 on */
    const float large = 1.0f - 2.0f / (exp_inside(b + b) + 1.0f);
    return a < 0.625f ? small : __builtin_copysignf(large, x);
}

INLINE float sigmoid_f(float x)
{
    float r, a = -__builtin_fabsf(x);
    a = a < -104.0f ? -104.0f : a;
    uint32_t k;
    const float q = exp_reduce(a, &r, &k);
    const float z = scale(1.0f + fma_f(r * r, q, r), k); /* exp(-|x|), one ulp */
    return (x < 0.0f ? z : 1.0f) / (1.0f + z);
}

INLINE float erf_f(float x)
{
    const float a = __builtin_fabsf(x), z = x * x;
    float p = 0x1.5cd652p-14f;
    p = fma_f(p, z, -0x1.aa3fc2p-11f);
    p = fma_f(p, z, 0x1.54c80ap-8f);
    p = fma_f(p, z, -0x1.b80e94p-6f);
    p = fma_f(p, z, 0x1.ce2e0ap-4f);
    p = fma_f(p, z, -0x1.812742p-2f);
    p = fma_f(p, z, 0x1.06eba8p-3f);
    const float small = fma_f(x, p, x);
    float q = -0x1.78dd98p-17f;
    const float b = a > 4.0f ? 4.0f : a; /* one from 3.92 on */
    q = fma_f(q, b, 0x1.527c6cp-12f);
    q = fma_f(q, b, -0x1.dd6cdap-9f);
    q = fma_f(q, b, 0x1.85515ep-6f);
    q = fma_f(q, b, -0x1.b32574p-4f);
    q = fma_f(q, b, -0x1.45328ep-1f);
    q = fma_f(q, b, -0x1.0778dcp-3f);
    const float large = 1.0f - exp_inside(fma_f(q, b, -b));
    return a < 0.9277f ? small : __builtin_copysignf(large, x);
}
"""

_TRIGONOMETRY = """
INLINE float trig_reduce(float x, int32_t *quadrant)
{
    const uint32_t u = bits_of(x) & 0x7fffffffu;
    const int32_t e = (int32_t)(u >> 23) - 127;
    const int32_t at = e < 26 ? 0 : (e > 127 ? 102 : e - 25);
    const float whole = (float)(int32_t)((u & 0x7fffffu) | 0x800000u);
    const double s = e < 26 ? float_of(u) : whole; /* |x| = s 2^k with k = e - 23, or s */
    const double p = s * TURNS_HIGH[at];
    const double low = __builtin_fma(s, TURNS_HIGH[at], -p) + s * TURNS_LOW[at];
    const double n = __builtin_rint(p * 0x1.45f306dc9c883p-1);
    const double r = __builtin_fma(n, -0x1.921fb54442d18p+0, p);
    *quadrant = (int32_t)n;
    return (float)(__builtin_fma(n, -0x1.1a62633145c07p-54, r) + low);
}

INLINE float trig_value(float r, int32_t quadrant)
{
    const float z = r * r;
    float s = 0x1.6ccf5ep-19f;
    s = fma_f(s, z, -0x1.a00f74p-13f);
    s = fma_f(s, z, 0x1.111108p-7f);
    s = fma_f(s, z, -0x1.555556p-3f);
    s = fma_f(r * z, s, r);
    float c = 0x1.99e86ap-16f;
    c = fma_f(c, z, -0x1.6c0c28p-10f);
    c = fma_f(c, z, 0x1.55554ap-5f);
    c = fma_f(z * z, c, fma_f(-0.5f, z, 1.0f));
    const float v = quadrant & 1 ? c : s;
    return float_of(bits_of(v) ^ (uint32_t)(quadrant & 2) << 30);
}

INLINE float sin_f(float x)
{
    int32_t q;
    const float r = trig_reduce(x, &q);
    const float v = float_of(bits_of(trig_value(r, q)) ^ (bits_of(x) & 0x80000000u));
    return __builtin_fabsf(x) < __builtin_inff() ? v : __builtin_nanf("");
}

INLINE float cos_f(float x)
{
    int32_t q;
    const float r = trig_reduce(x, &q);
    return __builtin_fabsf(x) < __builtin_inff() ? trig_value(r, q + 1) : __builtin_nanf("");
}
"""

_POWER = """
INLINE double log2_of(float x)
{
    const uint64_t u = bits_of_d((double)x) + 0x3ff0000000000000u - 0x3fe6a09e667f3bcdu;
    const double e = double_of(u >> 52 | 0x4330000000000000u) - 0x1.00000000003ffp+52; /* 2^52 + 1023 */
    const double m = double_of((u & 0xfffffffffffffu) + 0x3fe6a09e667f3bcdu);
    const double s = (m - 1.0) / (m + 1.0), z = s * s;
    double p = 1.0 / 15.0;
    p = __builtin_fma(p, z, 1.0 / 13.0);
    p = __builtin_fma(p, z, 1.0 / 11.0);
    p = __builtin_fma(p, z, 1.0 / 9.0);
    p = __builtin_fma(p, z, 1.0 / 7.0);
    p = __builtin_fma(p, z, 1.0 / 5.0);
    p = __builtin_fma(p, z, 1.0 / 3.0);
    p = __builtin_fma(p, z, 1.0);
    return __builtin_fma(s * p, 0x1.71547652b82fep+1, e);
}

INLINE float exp2_of(double t)
{
    double b = t > 130.0 ? 130.0 : t;
    b = b < -160.0 ? -160.0 : b;
    const double shifted = b + 0x1.8p+52;
    const double r = (b - (shifted - 0x1.8p+52)) * 0x1.62e42fefa39efp-1;
    double p = 1.0 / 40320.0;
    p = __builtin_fma(p, r, 1.0 / 5040.0);
    p = __builtin_fma(p, r, 1.0 / 720.0);
    p = __builtin_fma(p, r, 1.0 / 120.0);
    p = __builtin_fma(p, r, 1.0 / 24.0);
    p = __builtin_fma(p, r, 1.0 / 6.0);
    p = __builtin_fma(p, r, 0.5);
    p = __builtin_fma(p, r, 1.0);
    p = __builtin_fma(p, r, 1.0);
    return (float)(p * double_of((bits_of_d(shifted) - 0x4338000000000000u + 1023u) << 52));
}

INLINE float pow_f(float x, float y)
{
    const float a = __builtin_fabsf(x), inf = __builtin_inff();
    double l = log2_of(a);
    l = a == 0.0f ? -(double)inf : l;
    l = a == inf ? (double)inf : l;
    float v = exp2_of((double)y * l);
    const float h = 0.5f * y;
    const int whole = __builtin_truncf(y) == y, odd = whole & (__builtin_truncf(h) != h);
    v = (x < 0.0f) & (a < inf) & !whole ? __builtin_nanf("") : v;
    v = odd ? __builtin_copysignf(v, x) : v;
    v = (a == 1.0f) & (__builtin_fabsf(y) == inf) ? 1.0f : v;
    v = (x != x) | (y != y) ? x + y : v;
    return (x == 1.0f) | (y == 0.0f) ? 1.0f : v;
}
"""

_OTHERS = """
INLINE double max_d(double a, double b) { return a > b || a != a ? a : b; }

INLINE double min_d(double a, double b) { return a < b || a != a ? a : b; }

INLINE double sign_d(double x) { return (double)((x > 0.0) - (x < 0.0)); }

INLINE double rsqrt_d(double x) { return 1.0 / __builtin_sqrt(x); }

INLINE double sigmoid_d(double x)
{
    const double z = exp(-__builtin_fabs(x));
    return (x < 0.0 ? z : 1.0) / (1.0 + z);
}

INLINE int64_t max_i(int64_t a, int64_t b) { return a > b ? a : b; }

INLINE int64_t min_i(int64_t a, int64_t b) { return a < b ? a : b; }

INLINE int64_t abs_i(int64_t a) { return a < 0 ? -a : a; }

INLINE int64_t sign_i(int64_t a) { return (a > 0) - (a < 0); }

INLINE int64_t div_i(int64_t a, int64_t b) { return b == 0 ? 0 : b == -1 ? -a : a / b; }

INLINE int64_t mod_i(int64_t a, int64_t b) { return b == 0 || b == -1 ? 0 : a % b; }

INLINE int64_t shl_i(int64_t a, int64_t b)
{
    return b < 0 || b > 63 ? 0 : (int64_t)((uint64_t)a << b);
}

INLINE int64_t shr_i(int64_t a, int64_t b) { return b < 0 || b > 63 ? -(a < 0) : a >> b; }

INLINE int64_t pow_i(int64_t a, int64_t b)
{
    int64_t r = 1;
    if (b < 0) return a == 1 ? 1 : a == -1 ? (b & 1 ? -1 : 1) : 0;
    for (; b; b >>= 1, a *= a) r = b & 1 ? r * a : r;
    return r;
}

INLINE int64_t floordiv(int64_t a, int64_t b) { return a / b - (a % b < 0); }
"""

# pi to 100 decimal places: 332 bits, enough for 2^104 mod 2 pi to 2^-220.
_PI = Fraction(
    int(
        "31415926535897932384626433832795028841971693993751"
        "058209749445923078164062862089986280348253421170679"
    ),
    10**100,
)


def turns() -> tuple[tuple[float, float], ...]:
    """2^k reduced to [-pi, pi] modulo 2 pi as a sum of two doubles, for k = 3..104; entry 0 is one."""
    out = [(1.0, 0.0)]
    for k in range(3, 105):
        rest = Fraction(2**k) - 2 * _PI * round(Fraction(2**k) / (2 * _PI))
        high = float(rest)
        out.append((high, float(rest - Fraction(high))))
    return tuple(out)


def _table(name: str, values: Iterable[float]) -> str:
    rows = [v.hex() for v in values]
    lines = ["    " + ", ".join(rows[i : i + 4]) + "," for i in range(0, len(rows), 4)]
    return "\n".join([f"static const double {name}[{len(rows)}] = {{", *lines, "};"])


def _paragraphs() -> dict[str, str]:
    """Definition of each name, in an order in which every one follows what it uses."""
    text = [_CONVERSIONS, _FLOAT, _TRIGONOMETRY, _POWER, _OTHERS]
    table = turns()
    out = {
        "TURNS_HIGH": _table("TURNS_HIGH", (high for high, _ in table)),
        "TURNS_LOW": _table("TURNS_LOW", (low for _, low in table)),
    }
    for paragraph in "".join(text).split("\n\n"):
        found = re.match(r"INLINE \w+ (\w+)\(", paragraph.strip())
        assert found, paragraph
        out[found[1]] = paragraph.strip()
    return out


PARAGRAPHS = _paragraphs()
_WORD = re.compile(r"[A-Za-z_]\w*")


def preamble(text: str) -> str:
    """The header and the definitions of every function that `text` uses, directly or not; nothing else."""
    wanted: set[str] = set()
    pending = [text]
    while pending:
        found = {w for w in _WORD.findall(pending.pop()) if w in PARAGRAPHS} - wanted
        wanted |= found
        pending += [PARAGRAPHS[name] for name in found]
    return "\n".join([HEADER, *(p + "\n" for name, p in PARAGRAPHS.items() if name in wanted)])
