// Vectors of the machine's width, written with the compiler's vector extensions so that the same
// source serves AVX-512, AVX2, SSE and NEON. Everything keeps IEEE inf and NaN.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int VW = 16;  // float lanes
constexpr int KR = 8;   // keys held in registers by the wide kernel: KR * 3 accumulators + 4
#elif defined(__AVX__)
constexpr int VW = 8;
constexpr int KR = 4;
#else
constexpr int VW = 4;
constexpr int KR = 4;
#endif

typedef float vf __attribute__((vector_size(VW * 4)));
typedef float vf_any __attribute__((vector_size(VW * 4), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(VW * 4)));
typedef uint32_t vu __attribute__((vector_size(VW * 4)));
typedef uint16_t vu16 __attribute__((vector_size(VW * 2)));
typedef uint8_t vu8 __attribute__((vector_size(VW)));

static inline vf load(const float* p) { return *reinterpret_cast<const vf_any*>(p); }
static inline void store(float* p, vf x) { *reinterpret_cast<vf_any*>(p) = x; }
// x - 0 is x for every x, -0 and NaN included, so this is a plain broadcast.
static inline vf splat(float x) { return x - vf{}; }
static inline vi splat_int(int32_t x) { return x - vi{}; }

// The same value, kept in a register: compilers would rather load it again for every use.
template <class V>
static inline V in_register(V x) {
#if defined(__AVX512F__)
  asm("" : "+v"(x));
#elif defined(__SSE2__)
  asm("" : "+x"(x));
#elif defined(__aarch64__)
  asm("" : "+w"(x));
#endif
  return x;
}

static inline vi lane_index() {
  vi x;
  for (int i = 0; i < VW; ++i) x[i] = i;
  return x;
}

#if defined(__clang__)
#define ATTNBACKEND_LANES(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define ATTNBACKEND_LANES(a, b, ...) __builtin_shuffle(a, b, vi{__VA_ARGS__})
#endif
template <int... I>
struct Lanes {  // I is 0 .. VW - 1; lanes of b count on from VW
  static inline vf even(vf a, vf b) { return ATTNBACKEND_LANES(a, b, (2 * I)...); }
  static inline vf odd(vf a, vf b) { return ATTNBACKEND_LANES(a, b, (2 * I + 1)...); }
  static inline vf zip_low(vf a, vf b) { return ATTNBACKEND_LANES(a, b, (I % 2 * VW + I / 2)...); }
  static inline vf zip_high(vf a, vf b) {
    return ATTNBACKEND_LANES(a, b, (I % 2 * VW + I / 2 + VW / 2)...);
  }
};
template <int N, int... I>
struct LanesFor : LanesFor<N - 1, N - 1, I...> {};
template <int... I>
struct LanesFor<0, I...> {
  typedef Lanes<I...> type;
};
typedef LanesFor<VW>::type AllLanes;

// The first half of the vectors zipped with the second, lane by lane. Of as many vectors as lanes, log2(N) times
// that is a transposition.
template <int N>
static inline void zip_halves(vf (&x)[N]) {
  vf y[N];
#pragma GCC unroll 8
  for (int i = 0; i < N / 2; ++i) {
    y[2 * i] = AllLanes::zip_low(x[i], x[i + N / 2]);
    y[2 * i + 1] = AllLanes::zip_high(x[i], x[i + N / 2]);
  }
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i) x[i] = y[i];
}

// VW rows of VW lanes, as bits: target[lane][row] = source[row][lane].
static inline void transpose(const float* source, int64_t row, float* target, int64_t lane) {
  vf x[VW];
#pragma GCC unroll 16
  for (int i = 0; i < VW; ++i) x[i] = load(source + i * row);
#pragma GCC unroll 4
  for (int n = 1; n < VW; n *= 2) zip_halves(x);
#pragma GCC unroll 16
  for (int i = 0; i < VW; ++i) store(target + i * lane, x[i]);
}

static inline vf pair_sums(vf a, vf b) { return AllLanes::even(a, b) + AllLanes::odd(a, b); }

// N vectors -> one whose lanes are N groups, in order, each with the sum of a vector's lanes in it; for
// N = VW a lane is one vector's sum.
template <int N>
struct Tree {
  static inline vf sums(const vf* x) {
    return pair_sums(Tree<N / 2>::sums(x), Tree<N / 2>::sums(x + N / 2));
  }
};
template <>
struct Tree<1> {
  static inline vf sums(const vf* x) { return *x; }
};

#if defined(__AVX512F__)
// The same with shuffles that take no index from a register.
static inline __m512 quad_sums(const vf* x) {  // lanes 4 i .. 4 i + 3: of the four vectors, in order
  const __m512 a = (__m512)x[0], b = (__m512)x[1], c = (__m512)x[2], d = (__m512)x[3];
  const __m512d ab = (__m512d)_mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  const __m512d cd = (__m512d)_mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  return _mm512_add_ps((__m512)_mm512_unpacklo_pd(ab, cd), (__m512)_mm512_unpackhi_pd(ab, cd));
}
static inline __m512 quarter_sums(__m512 a, __m512 b) {
  return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}
template <>
struct Tree<16> {
  static inline vf sums(const vf* x) {
    const __m512 low = quarter_sums(quad_sums(x), quad_sums(x + 4));
    return (vf)quarter_sums(low, quarter_sums(quad_sums(x + 8), quad_sums(x + 12)));
  }
};
#endif

#if defined(__AVX512F__)
struct Sum {
  static inline __m256 of(__m256 a, __m256 b) { return _mm256_add_ps(a, b); }
  static inline __m128 of(__m128 a, __m128 b) { return _mm_add_ps(a, b); }
};
struct Maximum {
  static inline __m256 of(__m256 a, __m256 b) { return _mm256_max_ps(a, b); }
  static inline __m128 of(__m128 a, __m128 b) { return _mm_max_ps(a, b); }
};
template <class Combine>  // of the vector's halves, of theirs again, down to one lane
static inline float fold_lanes(vf x) {
  const __m512 y = (__m512)x;
  const __m256 upper = (__m256)_mm512_extractf64x4_pd((__m512d)y, 1);
  const __m256 eight = Combine::of(_mm512_castps512_ps256(y), upper);
  const __m128 four = Combine::of(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = Combine::of(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(Combine::of(two, _mm_movehdup_ps(two)));
}
static inline float sum_lanes(vf x) { return fold_lanes<Sum>(x); }
static inline float max_lanes(vf x) { return fold_lanes<Maximum>(x); }
#else
static inline float sum_lanes(vf x) {
  for (int n = 1; n < VW; n *= 2) x = pair_sums(x, x);
  return x[0];
}

static inline float max_lanes(vf x) {
  for (int n = 1; n < VW; n *= 2) {
    const vf a = AllLanes::even(x, x), b = AllLanes::odd(x, x);
    x = a > b ? a : b;
  }
  return x[0];
}
#endif

// exp for x <= 0 (or NaN), relative error about 1 ulp; below the smallest normal it gives 0.
// x = n ln2 + r with |r| <= ln2/2; exp(r) = 1 + r + r^2 q(r), q fitted at Chebyshev nodes.
static inline vf exp_of_rest(vf r) {
  vf q = r * 0.001393390935845673f + 0.008363353088498116f;
  q = q * r + 0.041666463017463684f;
  q = q * r + 0.16666576266288757f;
  q = q * r + 0.5f;
  return (q * r) * r + r + 1.0f;
}

constexpr float LOG2_E = 1.44269504088896341f, LN2_HIGH = 0.693145751953125f;
constexpr float LN2_LOW = 1.42860682030941723e-6f, SMALLEST_EXPONENT = -87.3365f;

#if defined(__AVX512F__)
static inline vf exp_nonpositive(vf x) {
  const __m512 y = (__m512)x;
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(y, _mm512_set1_ps(LOG2_E)), _MM_FROUND_TO_NEAREST_INT);
  const vf p = exp_of_rest((x - (vf)n * LN2_HIGH) - (vf)n * LN2_LOW);
  const __mmask16 normal = _mm512_cmp_ps_mask(y, _mm512_set1_ps(SMALLEST_EXPONENT), _CMP_NLT_UQ);
  return (vf)_mm512_maskz_scalef_ps(normal, (__m512)p, n);
}
#else
static inline vf exp_nonpositive(vf x) {
  const float round_shift = 12582912.0f;  // 1.5 * 2^23
  const vi tiny = x < SMALLEST_EXPONENT;
  const vf y = tiny ? vf{} : x;
  const vf n = (y * LOG2_E + round_shift) - round_shift;
  const vf p = exp_of_rest((y - n * LN2_HIGH) - n * LN2_LOW);
  const vi power = (__builtin_convertvector(n, vi) + 127) << 23;
  const vf result = p * reinterpret_cast<vf>(power);
  return tiny ? vf{} : result;
}
#endif

// 1 / x for x from 1 to 2, to about 1 ulp.
static inline vf inverse_of_sum(vf x) {
#if defined(__AVX512F__)
  const vf y = (vf)_mm512_rcp14_ps((__m512)x);
  return y * (1.0f - x * y) + y;
#else
  return 1.0f / x;
#endif
}

// x / (1 + exp(-x))
static inline vf silu(vf x) {
  const vf e = exp_nonpositive(x < 0 ? x : -x);
  return (x < 0 ? x * e : x) * inverse_of_sum(1.0f + e);
}

// tanh to about 2 ulp: odd polynomial near 0, (1 - e) / (1 + e) with e = exp(-2|x|) elsewhere.
static inline vf tanh_vector(vf x) {
  const vf a = x < 0 ? -x : x;
  const vf z = a * a;
  vf q = z * 0.002218102104961872f - 0.00827582273632288f;
  q = q * z + 0.021747421473264694f;
  q = q * z - 0.0539565347135067f;
  q = q * z + 0.13333292305469513f;
  q = q * z - 0.3333333432674408f;
  const vf near = (q * z) * a + a;
  const vf e = exp_nonpositive(-2.0f * a);
  const vf far = (1.0f - e) / (1.0f + e);
  const vf y = a < 0.625f ? near : far;
  return x < 0 ? -y : y;
}
