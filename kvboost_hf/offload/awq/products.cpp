// Multiplies by weights of 4 and 8 bits on CPUs with AVX2, for `int4pack.py`, which describes the layout of 4-bit codes,
// and `head.py`.
//
// Each group of inputs of a token is rounded to integers of 16 bits with a scale of its own. Products of such integers
// and codes are summed up exactly, in int32; sums of groups are multiplied by the scales and added in float32.
// 4-bit weights are unpacked once for all tokens, 32 columns of one group at a time. A single token is multiplied by
// blocks of 64 columns as they lie in memory, each half of its integers for itself: the sums are the same.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <immintrin.h>
#include <torch/library.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

namespace {

constexpr int64_t kColumns = 32;  // unpacked at a time: those of 16 bytes
constexpr int64_t kBlock = 64;  // columns, where a single token is multiplied by blocks
constexpr float kLargest = 127 * 256 + 127;  // integer: both of its halves fit into 8 bits
constexpr int64_t kMostGroup = 128;
#if defined(__AVX512VL__)
constexpr int64_t kTokens = 4;  // multiplied at a time: their sums fit into registers
#else
constexpr int64_t kTokens = 3;
#endif
constexpr int64_t kHeadGroup = 64;  // inputs that share a scale, for codes of 8 bits
constexpr int64_t kTile = 96;  // tokens whose integers stay in the cache of a processor

struct Rounded {  // the inputs of a product
  std::vector<int16_t> values;  // [tokens, in]
  std::vector<float> scales;  // [tokens, groups]
  std::vector<int32_t> sums;  // [tokens, groups], of the values

  // Of each four values of a single token the upper halves, and then the lower ones.
  std::vector<int8_t> halves() const {
    const __m256i fours = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7, 12, 13, 14, 15));
    std::vector<int8_t> found(2 * values.size());
    for (size_t i = 0; i < values.size(); i += 16) {
      const __m256i whole = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(&values[i]));
      const __m256i lower = _mm256_srai_epi16(_mm256_slli_epi16(whole, 8), 8);
      const __m256i upper = _mm256_srai_epi16(_mm256_sub_epi16(whole, lower), 8);
      const __m256i both = _mm256_shuffle_epi8(_mm256_packs_epi16(upper, lower), fours);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(&found[2 * i]), both);
    }
    return found;
  }
};

inline __m256 load(const float* x) { return _mm256_loadu_ps(x); }

inline __m256 load(const at::Half* x) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x))); }

inline __m256 load(const at::BFloat16* x) {
  const __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(words, 16));
}

template <typename Combine>
inline auto over_lanes(__m256i lanes, Combine combine) {
  alignas(32) int32_t each[8];
  _mm256_store_si256(reinterpret_cast<__m256i*>(each), lanes);
  return std::accumulate(each + 1, each + 8, each[0], combine);
}

// The size is a multiple of 16.
template <typename T>
void round_group(const T* x, int64_t size, int16_t* values, float* scale, int32_t* sum) {
  const __m256i no_sign = _mm256_set1_epi32(0x7fffffff);
  __m256i most = _mm256_setzero_si256();  // numbers that are not negative have the order of their bits
  for (int64_t i = 0; i < size; i += 8) {
    most = _mm256_max_epi32(most, _mm256_and_si256(_mm256_castps_si256(load(x + i)), no_sign));
  }
  const float largest = std::bit_cast<float>(over_lanes(most, [](int32_t a, int32_t b) { return std::max(a, b); }));
  const bool finite = std::isfinite(largest);
  const __m256 factor = _mm256_set1_ps(finite && largest > 1e-30f ? kLargest / largest : 0.0f);  // finite, too
  __m256i total = _mm256_setzero_si256();
  for (int64_t i = 0; i < size; i += 16) {
    const __m256i one = _mm256_cvtps_epi32(_mm256_mul_ps(load(x + i), factor));
    const __m256i two = _mm256_cvtps_epi32(_mm256_mul_ps(load(x + i + 8), factor));
    total = _mm256_add_epi32(total, _mm256_add_epi32(one, two));
    const __m256i both = _mm256_permute4x64_epi64(_mm256_packs_epi32(one, two), 0b11011000);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(values + i), both);
  }
  *scale = finite ? largest / kLargest : NAN;
  *sum = over_lanes(total, [](int32_t a, int32_t b) { return static_cast<int32_t>(uint32_t(a) + uint32_t(b)); });
}

inline __m256i add_products(__m256i sum, __m256i x, __m256i weights) {
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
  return _mm256_dpwssd_epi32(sum, x, weights);
#else
  return _mm256_add_epi32(sum, _mm256_madd_epi16(x, weights));
#endif
}

// Add the products of four codes and four signed bytes in each 32 bits.
inline __m256i add_bytes(__m256i sum, __m256i codes, __m256i x) {
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
  return _mm256_dpbusd_epi32(sum, codes, x);
#else
  return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(codes, x), _mm256_set1_epi16(1)));
#endif
}

// The scales and zero points of 8 columns of a group.
struct Steps {
  __m256 scales;
  __m256i zeros;

  // Args: those of the group from the first of the columns on; `next`, the columns that are read next.
  Steps(const at::Half* scales, const int32_t* qzeros, int64_t next) {
    const __m256i shifts = _mm256_setr_epi32(0, 16, 4, 20, 8, 24, 12, 28);
    _mm_prefetch(reinterpret_cast<const char*>(scales + next), _MM_HINT_T0);
    _mm_prefetch(reinterpret_cast<const char*>(qzeros + next / 8), _MM_HINT_T0);
    this->scales = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(scales)));
    zeros = _mm256_and_si256(_mm256_srlv_epi32(_mm256_set1_epi32(*qzeros), shifts), _mm256_set1_epi32(15));
  }

  // Add sums of integers to `total`, as numbers.
  __m256 added(__m256 total, __m256i sums, __m256i x_sum, __m256 x_scale) const {
    const __m256i exact = _mm256_sub_epi32(sums, _mm256_mullo_epi32(zeros, x_sum));
    return _mm256_fmadd_ps(_mm256_cvtepi32_ps(exact), _mm256_mul_ps(scales, x_scale), total);
  }
};

// Pairs of inputs of 32 columns, 8 columns in each vector, unpacked from the codes of two inputs.
struct Pairs {
  __m256i columns[4];
};

inline Pairs unpack(const uint8_t* codes, int64_t stride) {
  const __m128i low = _mm_set1_epi8(15);
  const __m128i one = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
  const __m128i two = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + stride));
  const __m128i left = _mm_unpacklo_epi8(one, two), right = _mm_unpackhi_epi8(one, two);
  return {{_mm256_cvtepu8_epi16(_mm_and_si128(left, low)), _mm256_cvtepu8_epi16(_mm_and_si128(right, low)),
           _mm256_cvtepu8_epi16(_mm_and_si128(_mm_srli_epi16(left, 4), low)),
           _mm256_cvtepu8_epi16(_mm_and_si128(_mm_srli_epi16(right, 4), low))}};
}

struct Codes {  // as they are: for one token
  const uint8_t* first;
  int64_t stride;
  Pairs pairs(int64_t i) const { return unpack(first + i * stride, stride); }
};

struct Unpacked {  // for several tokens
  const int16_t* first;
  Pairs pairs(int64_t i) const {
    Pairs found;
    for (int c = 0; c < 4; c++) {
      found.columns[c] = _mm256_load_si256(reinterpret_cast<const __m256i*>(first + kColumns * i + 16 * c));
    }
    return found;
  }
};

inline void unpack_all(const Codes& codes, int64_t size, int16_t* out) {
  for (int64_t i = 0; i < size; i += 2) {
    const Pairs found = codes.pairs(i);
    for (int c = 0; c < 4; c++) {
      _mm256_store_si256(reinterpret_cast<__m256i*>(out + kColumns * i + 16 * c), found.columns[c]);
    }
  }
}

// Add the products of some tokens and one group of 32 columns to `out`, [tokens, 32].
template <int64_t tokens, typename Weights>
inline void add_group(
    const int16_t* x, int64_t x_stride, const float* x_scales, const int32_t* x_sums, int64_t groups,
    const Weights& weights, int64_t size, const Steps* steps, float* out) {
  __m256i sums[tokens][4];
  for (int64_t t = 0; t < tokens; t++) {
    for (int c = 0; c < 4; c++) sums[t][c] = _mm256_setzero_si256();
  }
  for (int64_t i = 0; i < size; i += 2) {
    const Pairs held = weights.pairs(i);
    for (int64_t t = 0; t < tokens; t++) {
      int32_t both;
      __builtin_memcpy(&both, x + t * x_stride + i, sizeof(both));
      const __m256i pair = _mm256_set1_epi32(both);
      for (int c = 0; c < 4; c++) sums[t][c] = add_products(sums[t][c], pair, held.columns[c]);
    }
  }
  for (int64_t t = 0; t < tokens; t++) {
    const __m256 x_scale = _mm256_set1_ps(x_scales[t * groups]);
    const __m256i x_sum = _mm256_set1_epi32(x_sums[t * groups]);
    for (int c = 0; c < 4; c++) {
      float* target = out + t * kColumns + 8 * c;
      _mm256_storeu_ps(target, steps[c].added(_mm256_loadu_ps(target), sums[t][c], x_sum, x_scale));
    }
  }
}

// Multiply some tokens by 32 columns: those of the low nibbles from `first` on, and those of the high ones from `second`.
void multiply(
    const Rounded& x, int64_t begin, int64_t end, int64_t in_features, int64_t out_features, const uint8_t* codes,
    int64_t stride, const int32_t* qzeros, const at::Half* scales, int64_t groups, int64_t first, int64_t second,
    float* out) {
  alignas(32) int16_t weights[kMostGroup * kColumns];
  const int64_t size = in_features / groups;
  std::fill(out, out + (end - begin) * kColumns, 0.0f);
  for (int64_t g = 0; g < groups; g++) {
    const Codes packed{codes + g * size * stride, stride};
    if (end - begin > 1) unpack_all(packed, size, weights);
    const auto of = [&](int64_t column) {
      return Steps(scales + g * out_features + column, qzeros + (g * out_features + column) / 8, kColumns);
    };
    const Steps steps[4] = {of(first), of(first + 8), of(second), of(second + 8)};
    int64_t t = begin;
    const auto add = [&](auto count, const auto& held) {
      constexpr int64_t tokens = decltype(count)::value;
      for (; t + tokens <= end; t += tokens) {
        add_group<tokens>(
            x.values.data() + t * in_features + g * size, in_features, x.scales.data() + t * groups + g,
            x.sums.data() + t * groups + g, groups, held, size, steps, out + (t - begin) * kColumns);
      }
    };
    if (end - begin == 1) {
      add(std::integral_constant<int64_t, 1>{}, packed);
    } else {
      add(std::integral_constant<int64_t, kTokens>{}, Unpacked{weights});
      add(std::integral_constant<int64_t, 2>{}, Unpacked{weights});
      add(std::integral_constant<int64_t, 1>{}, Unpacked{weights});
    }
  }
}

// Multiply a single token by the block of 64 columns from `first` on.
void multiply_block(
    const Rounded& x, const int8_t* halves, int64_t in_features, int64_t out_features, const uint8_t* codes,
    const int32_t* qzeros, const at::Half* scales, int64_t groups, int64_t first, float* out) {
  const int64_t size = in_features / groups;
  const __m256i low = _mm256_set1_epi8(15);
  __m256 totals[8];
  for (auto& total : totals) total = _mm256_setzero_ps();
  for (int64_t g = 0; g < groups; g++) {
    // Of columns 0 to 31 and 32 to 63, in fours: 0-3 and 16-19, 4-7 and 20-23, 8-11 and 24-27, 12-15 and 28-31.
    __m256i upper[8], lower[8];
    for (int c = 0; c < 8; c++) upper[c] = lower[c] = _mm256_setzero_si256();
    for (int64_t i = g * size; i < (g + 1) * size; i += 4) {
      const auto* rows = reinterpret_cast<const __m256i*>(codes + i * kBlock / 2);
      const __m256i one = _mm256_loadu_si256(rows), two = _mm256_loadu_si256(rows + 1);
      const __m256i three = _mm256_loadu_si256(rows + 2), four = _mm256_loadu_si256(rows + 3);
      const __m256i left = _mm256_unpacklo_epi8(one, two), right = _mm256_unpackhi_epi8(one, two);
      const __m256i left_too = _mm256_unpacklo_epi8(three, four), right_too = _mm256_unpackhi_epi8(three, four);
      const __m256i fours[4] = {
          _mm256_unpacklo_epi16(left, left_too), _mm256_unpackhi_epi16(left, left_too),
          _mm256_unpacklo_epi16(right, right_too), _mm256_unpackhi_epi16(right, right_too)};
      int32_t given[2];
      __builtin_memcpy(given, halves + 2 * i, sizeof(given));
      const __m256i x_upper = _mm256_set1_epi32(given[0]), x_lower = _mm256_set1_epi32(given[1]);
      for (int c = 0; c < 4; c++) {
        const __m256i nibbles[2] = {
            _mm256_and_si256(fours[c], low), _mm256_and_si256(_mm256_srli_epi16(fours[c], 4), low)};
        for (int half = 0; half < 2; half++) {
          upper[4 * half + c] = add_bytes(upper[4 * half + c], nibbles[half], x_upper);
          lower[4 * half + c] = add_bytes(lower[4 * half + c], nibbles[half], x_lower);
        }
      }
    }
    const __m256 x_scale = _mm256_set1_ps(x.scales[g]);
    const __m256i x_sum = _mm256_set1_epi32(x.sums[g]);
    const auto sums = [&](int c) { return _mm256_add_epi32(_mm256_slli_epi32(upper[c], 8), lower[c]); };
    const auto add = [&](int c, __m256i found) {
      const int64_t column = g * out_features + first + 8 * c;
      totals[c] = Steps(scales + column, qzeros + column / 8, kBlock).added(totals[c], found, x_sum, x_scale);
    };
    for (int c = 0; c < 8; c += 2) {  // two of fours: columns of 8 in their lower lanes, and of 8 that are 16 behind
      const __m256i one = sums(c), two = sums(c + 1);
      const int from = c / 4 * 4 + c % 4 / 2;
      add(from, _mm256_permute2x128_si256(one, two, 0x20));
      add(from + 2, _mm256_permute2x128_si256(one, two, 0x31));
    }
  }
  for (int c = 0; c < 8; c++) _mm256_storeu_ps(out + 8 * c, totals[c]);
}

template <typename T>
Rounded round_all(const at::Tensor& x, int64_t groups) {
  const int64_t tokens = x.size(0), size = x.size(1) / groups;
  Rounded held;
  held.values.resize(x.numel());
  held.scales.resize(tokens * groups);
  held.sums.resize(tokens * groups);
  const T* given = x.const_data_ptr<T>();
  at::parallel_for(0, tokens, 8, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin * groups; i < end * groups; i++) {
      round_group(given + i * size, size, &held.values[i * size], &held.scales[i], &held.sums[i]);
    }
  });
  return held;
}

template <typename T>
void multiply_all(
    const at::Tensor& x, const at::Tensor& qweight, const at::Tensor& qzeros, const at::Tensor& scales, int64_t block,
    at::Tensor& out) {
  const int64_t tokens = x.size(0), in_features = x.size(1), out_features = qweight.size(0), groups = scales.size(0);
  const Rounded held = round_all<T>(x, groups);
  T* target = out.mutable_data_ptr<T>();
  const uint8_t* codes = qweight.const_data_ptr<uint8_t>();
  const int32_t* zeros = qzeros.const_data_ptr<int32_t>();
  const at::Half* steps = scales.const_data_ptr<at::Half>();
  if (tokens == 1 && block == kBlock) {
    const std::vector<int8_t> halves = held.halves();
    const int64_t least = std::max<int64_t>(1, (1 << 16) / (in_features * kBlock));
    at::parallel_for(0, out_features / kBlock, least, [&](int64_t begin, int64_t end) {
      float sums[kBlock];
      for (int64_t first = begin * kBlock; first < end * kBlock; first += kBlock) {
        multiply_block(held, halves.data(), in_features, out_features, codes + first * in_features / 2, zeros, steps,
                       groups, first, sums);
        for (int64_t c = 0; c < kBlock; c++) target[first + c] = static_cast<T>(sums[c]);
      }
    });
    return;
  }
  const int64_t parts = block / kColumns;  // of 16 bytes, in a block of columns
  const int64_t tasks = out_features / kColumns;
  const int64_t least = std::max<int64_t>(1, (1 << 16) / (in_features * kColumns * tokens));
  at::parallel_for(0, tasks, least, [&](int64_t begin, int64_t end) {
    alignas(32) float sums[kTile * kColumns];
    for (int64_t start = 0; start < tokens; start += kTile) {
      const int64_t stop = std::min(start + kTile, tokens);
      for (int64_t task = begin; task < end; task++) {
        const int64_t from = task / parts * block, part = task % parts;
        const int64_t first = from + 16 * part, second = first + block / 2;
        multiply(held, start, stop, in_features, out_features, codes + from * in_features / 2 + 16 * part, block / 2,
                 zeros, steps, groups, first, second, sums);
        for (int64_t t = start; t < stop; t++) {
          const float* row = sums + (t - start) * kColumns;
          for (int64_t c = 0; c < 16; c++) {
            target[t * out_features + first + c] = static_cast<T>(row[c]);
            target[t * out_features + second + c] = static_cast<T>(row[16 + c]);
          }
        }
      }
    }
  });
}

at::Tensor int4pack_mm(
    const at::Tensor& x, const at::Tensor& qweight, const at::Tensor& qzeros, const at::Tensor& scales,
    int64_t block) {
  TORCH_CHECK(x.dim() == 2 && x.is_contiguous() && qweight.is_contiguous() && qzeros.is_contiguous() &&
                  scales.is_contiguous(), "int4pack_mm: tensors must be contiguous");
  TORCH_CHECK(block % kColumns == 0 && qweight.size(0) % block == 0 && 2 * qweight.size(1) == x.size(1) &&
                  scales.size(1) == qweight.size(0) && x.size(1) % scales.size(0) == 0 &&
                  x.size(1) / scales.size(0) <= kMostGroup && x.size(1) / scales.size(0) % 16 == 0,
              "int4pack_mm: sizes do not fit");
  at::Tensor out = at::empty({x.size(0), qweight.size(0)}, x.options());
  if (out.numel() == 0) return out;
  switch (x.scalar_type()) {
    case at::kFloat: multiply_all<float>(x, qweight, qzeros, scales, block, out); break;
    case at::kBFloat16: multiply_all<at::BFloat16>(x, qweight, qzeros, scales, block, out); break;
    case at::kHalf: multiply_all<at::Half>(x, qweight, qzeros, scales, block, out); break;
    default: TORCH_CHECK(false, "int4pack_mm: dtype ", x.scalar_type());
  }
  return out;
}

inline float sum_of(__m256 parts) {
  __m128 found = _mm_add_ps(_mm256_castps256_ps128(parts), _mm256_extractf128_ps(parts, 1));
  found = _mm_add_ps(found, _mm_movehl_ps(found, found));
  return _mm_cvtss_f32(_mm_add_ss(found, _mm_movehdup_ps(found)));
}

// Multiply one token by one row of codes. Several rows at a time take four times as long: they are read from memory in
// as many places, which processors do not foresee.
inline float multiply_row(const int16_t* x, const float* x_scales, const int8_t* codes, int64_t in_features) {
  __m256 total = _mm256_setzero_ps();
  for (int64_t start = 0; start < in_features; start += kHeadGroup) {
    __m256i sum = _mm256_setzero_si256();
    for (int64_t i = start; i < start + kHeadGroup; i += 16) {
      const __m256i row = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + i)));
      sum = add_products(sum, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + i)), row);
    }
    total = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), _mm256_set1_ps(x_scales[start / kHeadGroup]), total);
  }
  return sum_of(total);
}

template <typename T>
void multiply_head(const at::Tensor& x, const at::Tensor& codes, const at::Tensor& scales, at::Tensor& out) {
  const int64_t tokens = x.size(0), in_features = x.size(1), out_features = codes.size(0);
  const int64_t groups = in_features / kHeadGroup;
  const Rounded held = round_all<T>(x, groups);
  T* target = out.mutable_data_ptr<T>();
  const int8_t* first = codes.const_data_ptr<int8_t>();
  const float* steps = scales.const_data_ptr<float>();
  at::parallel_for(0, out_features, 256, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
      for (int64_t t = 0; t < tokens; t++) {
        const float found = multiply_row(
            &held.values[t * in_features], &held.scales[t * groups], first + row * in_features, in_features);
        target[t * out_features + row] = static_cast<T>(found * steps[row]);
      }
    }
  });
}

at::Tensor int8_mm(const at::Tensor& x, const at::Tensor& codes, const at::Tensor& scales) {
  TORCH_CHECK(x.dim() == 2 && x.is_contiguous() && codes.is_contiguous() && scales.is_contiguous(),
              "int8_mm: tensors must be contiguous");
  TORCH_CHECK(codes.size(1) == x.size(1) && x.size(1) % kHeadGroup == 0 &&
                  scales.size(0) == codes.size(0), "int8_mm: sizes do not fit");
  at::Tensor out = at::empty({x.size(0), codes.size(0)}, x.options());
  if (out.numel() == 0) return out;
  switch (x.scalar_type()) {
    case at::kFloat: multiply_head<float>(x, codes, scales, out); break;
    case at::kBFloat16: multiply_head<at::BFloat16>(x, codes, scales, out); break;
    case at::kHalf: multiply_head<at::Half>(x, codes, scales, out); break;
    default: TORCH_CHECK(false, "int8_mm: dtype ", x.scalar_type());
  }
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(kvboost_hf, m) {
  m.def("int4pack_mm(Tensor x, Tensor qweight, Tensor qzeros, Tensor scales, int block) -> Tensor");
  m.def("int8_mm(Tensor x, Tensor codes, Tensor scales) -> Tensor");
}
TORCH_LIBRARY_IMPL(kvboost_hf, CPU, m) {
  m.impl("int4pack_mm", &int4pack_mm);
  m.impl("int8_mm", &int8_mm);
}
