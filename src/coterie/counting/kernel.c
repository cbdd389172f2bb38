/* What is computed of each request's counts, for coterie.counting.native, which checks sizes and calls it.

   Plain loops, which the compiler makes vectors of; sums are taken in LANES parts, and nothing is fused
   (-ffp-contract=off), so that all levels of instructions give the same bits.  Arrays are contiguous. */

#include <stdint.h>
#include <string.h>

#define LANES 16
#define BLOCK 256                     /* numbers that pass several loops while they are at hand */
#define UNIT (1.0f / (1 << 20))       /* as numpy_kernel.UNIT */
#define LEAST -60.0f                  /* as numpy_kernel.LEAST */

#define INLINE static inline __attribute__((always_inline))

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

INLINE int32_t bits_of(float value)
{
    int32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

INLINE float of_bits(int32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* exp(x) = 2^n exp(r), n = round(x / ln 2), by the Taylor series of exp to the seventh power: |r| <= ln(2) / 2, so what
   is left out is below 1e-8 of the result.  -87 <= x <= 0; exact at 0. */
INLINE float exponential(float x)
{
    const float magic = 12582912.0f; /* 1.5 * 2^23: its last bit is worth 1 */
    float shifted = x * 1.44269504f + magic, n = shifted - magic;
    float r = x - n * 0.693145752f; /* ln 2 in two parts, the first with few bits: n times it is exact */
    r = r - n * 1.42860677e-6f;
    float sum = 1.0f / 5040;
    sum = sum * r + 1.0f / 720;
    sum = sum * r + 1.0f / 120;
    sum = sum * r + 1.0f / 24;
    sum = sum * r + 1.0f / 6;
    sum = sum * r + 0.5f;
    sum = sum * r + 1.0f;
    sum = sum * r + 1.0f;
    return of_bits(bits_of(sum) + (int32_t)((uint32_t)(bits_of(shifted) - bits_of(magic)) << 23));
}

/* log(y) = e ln 2 + log(m), y = 2^e m, sqrt(1/2) <= m < sqrt(2), log(m) = 2 artanh((m - 1) / (m + 1)) to the ninth
   power: what is left out is below 1e-9.  y > 0 and normal; exact at 1. */
INLINE float logarithm(float y)
{
    int32_t high = (bits_of(y) - 0x3f3504f3) >> 23; /* e, such that m lies about 1 */
    float m = of_bits(bits_of(y) - (int32_t)((uint32_t)high << 23)), e = (float)high;
    float s = (m - 1) / (m + 1), square = s * s;
    float sum = 2.0f / 9;
    sum = sum * square + 2.0f / 7;
    sum = sum * square + 2.0f / 5;
    sum = sum * square + 2.0f / 3;
    sum = sum * square * s + 2 * s;
    return e * 1.42860677e-6f + sum + e * 0.693145752f;
}

/* A sum of logarithms, in units, as a number; below 2^51, all of which doubles of this size are apart. */
INLINE float in_ones(int64_t sum)
{
    int64_t bits = sum + 0x4338000000000000; /* of 1.5 * 2^52, whose last bit is worth 1 */
    double value;
    memcpy(&value, &bits, sizeof value);
    return (float)((value - 6755399441055744.0) * UNIT);
}

/* The greater of a logarithm, which is not above 0, and LEAST: as bits, since compilers make no vectors of the other. */
INLINE float bounded(float logarithm)
{
    uint32_t bits = bits_of(logarithm), most = bits_of(LEAST);
    return of_bits(bits < most ? bits : most);
}

/* --- counts ---------------------------------------------------------------------------------------------------- */

/* Whether each layer sums to `each`, and no count is greater than `most`. */
#define CONSERVES(TYPE)                                                                                               \
    static int conserves_##TYPE(const TYPE *counts, int64_t layers, int64_t experts, uint64_t each, uint64_t most)    \
    {                                                                                                                 \
        TYPE top = 0;                                                                                                 \
        for (int64_t layer = 0; layer < layers; layer++, counts += experts) {                                         \
            uint64_t sum = 0;                                                                                         \
            for (int64_t start = 0; start < experts; start += 4096) { /* so many of 16 bits fit 32 */                 \
                uint32_t low = 0;                                                                                     \
                for (int64_t e = start; e < least(start + 4096, experts); e++) {                                      \
                    low += (uint32_t)counts[e] & 0xffff;                                                              \
                    top = counts[e] > top ? counts[e] : top;                                                          \
                }                                                                                                     \
                sum += low;                                                                                           \
                for (int64_t e = start; sizeof(TYPE) > 2 && e < least(start + 4096, experts); e++)                    \
                    sum += (uint64_t)((uint32_t)counts[e] >> 16) << 16;                                               \
            }                                                                                                         \
            if (sum != each)                                                                                          \
                return 0;                                                                                             \
        }                                                                                                             \
        return top <= most;                                                                                           \
    }

CONSERVES(uint8_t)
CONSERVES(uint16_t)
CONSERVES(uint32_t)

int coterie_conserves(const void *counts, int64_t item, int64_t layers, int64_t experts, uint64_t each, uint64_t most)
{
    if (item == 1)
        return conserves_uint8_t(counts, layers, experts, each, most);
    if (item == 2)
        return conserves_uint16_t(counts, layers, experts, each, most);
    return conserves_uint32_t(counts, layers, experts, each, most);
}

/* usage [n] = min(counts / covered, most) */
#define USAGE(TYPE)                                                                                                   \
    static void usage_##TYPE(const TYPE *counts, int64_t n, float covered, float most, float *usage)                  \
    {                                                                                                                 \
        for (int64_t i = 0; i < n; i++) {                                                                             \
            float share = (float)counts[i] / covered;                                                                 \
            usage[i] = share < most ? share : most;                                                                   \
        }                                                                                                             \
    }

USAGE(uint8_t)
USAGE(uint16_t)
USAGE(uint32_t)

void coterie_usage(const void *counts, int64_t item, int64_t n, float covered, float most, float *usage)
{
    if (item == 1)
        usage_uint8_t(counts, n, covered, most, usage);
    else if (item == 2)
        usage_uint16_t(counts, n, covered, most, usage);
    else
        usage_uint32_t(counts, n, covered, most, usage);
}

/* --- batches --------------------------------------------------------------------------------------------------- */

/* mean [n] += (usage - mean) / requests */
void coterie_blend(float *restrict mean, const float *restrict usage, int64_t n, float requests)
{
    for (int64_t i = 0; i < n; i++)
        mean[i] += (usage[i] - mean[i]) / requests;
}

/* row [n] = round(log(1 - usage) / UNIT) */
void coterie_row(const float *restrict usage, int64_t n, int32_t *restrict row)
{
    for (int64_t i = 0; i < n; i++)
        row[i] = (int32_t)__builtin_rintf(logarithm(1 - usage[i]) * (1 / UNIT));
}

/* sums [n] += sign * row; the sum of what then is idle. */
double coterie_grow(int64_t *restrict sums, const int32_t *restrict row, int64_t n, int64_t sign)
{
    double parts[LANES] = {0}, idle = 0;
    for (int64_t start = 0; start < n; start += BLOCK) {
        float each[BLOCK];
        int64_t count = least(BLOCK, n - start), whole = count / LANES * LANES;
        if (sign < 0)
            for (int64_t i = 0; i < count; i++)
                sums[start + i] -= row[start + i];
        else
            for (int64_t i = 0; i < count; i++)
                sums[start + i] += row[start + i];
        for (int64_t i = 0; i < count; i++)
            each[i] = in_ones(sums[start + i]);
        for (int64_t i = 0; i < count; i++)
            each[i] = exponential(bounded(each[i]));
        for (int64_t i = 0; i < whole; i += LANES)
            for (int lane = 0; lane < LANES; lane++)
                parts[lane] += each[i + lane];
        for (int64_t i = whole; i < count; i++)
            idle += each[i];
    }
    for (int lane = 0; lane < LANES; lane++)
        idle += parts[lane];
    return idle;
}

/* A request joins: its row; the mean of now so many, and its log(1 - mean); and as coterie_grow. */
double coterie_join(const float *restrict usage, int64_t n, int32_t *restrict row, float *restrict mean,
                    float *restrict log_idle, float requests, int64_t *restrict sums)
{
    coterie_row(usage, n, row);
    coterie_blend(mean, usage, n, requests);
    for (int64_t i = 0; i < n; i++)
        log_idle[i] = logarithm(1 - mean[i]);
    return coterie_grow(sums, row, n, 1);
}

/* alike [n] = exp(share * (sums UNIT + weight log_idle)) */
void coterie_compose(float *restrict alike, const int64_t *restrict sums, const float *restrict log_idle, int64_t n,
                     float share, float weight)
{
    for (int64_t start = 0; start < n; start += BLOCK) {
        float each[BLOCK];
        int64_t count = least(BLOCK, n - start);
        for (int64_t i = 0; i < count; i++)
            each[i] = in_ones(sums[start + i]);
        for (int64_t i = 0; i < count; i++)
            each[i] = share * (each[i] + weight * log_idle[start + i]);
        for (int64_t i = 0; i < count; i++)
            alike[start + i] = exponential(bounded(each[i]));
    }
}

/* result [count] = each row's product with `usage`; equal rows give equal results, wherever they stand. */
void coterie_products(const float *restrict rows, int64_t count, const float *restrict usage, int64_t n,
                      double *restrict result)
{
    int64_t whole = n / (4 * LANES) * (4 * LANES);
    for (int64_t r = 0; r < count; r++, rows += n) {
        float parts[4 * LANES] = {0}, sum = 0;
        for (int64_t i = 0; i < whole; i += 4 * LANES)
            for (int lane = 0; lane < 4 * LANES; lane++)
                parts[lane] += rows[i + lane] * usage[i + lane];
        for (int64_t i = whole; i < n; i++)
            sum += rows[i] * usage[i];
        for (int lane = 0; lane < 4 * LANES; lane++)
            sum += parts[lane];
        result[r] = sum;
    }
}

/* --- signatures ------------------------------------------------------------------------------------------------ */

/* features [kept, experts] = counts [layers[i], experts] * weights, or the counts alone; the sum of their squares. */
#define FEATURES(TYPE)                                                                                                \
    static double features_##TYPE(const TYPE *counts, const int64_t *layers, int64_t kept, int64_t experts,           \
                                  const float *weights, float *features)                                              \
    {                                                                                                                 \
        float parts[LANES] = {0}, left = 0;                                                                           \
        double sum = 0;                                                                                               \
        for (int64_t k = 0; k < kept; k++, features += experts) {                                                     \
            const TYPE *row = counts + layers[k] * experts;                                                           \
            for (int64_t e = 0; e < experts; e++)                                                                     \
                features[e] = (float)row[e];                                                                          \
            for (int64_t e = 0; weights && e < experts; e++)                                                          \
                features[e] *= weights[k * experts + e];                                                              \
            int64_t whole = experts / LANES * LANES;                                                                  \
            for (int64_t e = 0; e < whole; e += LANES)                                                                \
                for (int lane = 0; lane < LANES; lane++)                                                              \
                    parts[lane] += features[e + lane] * features[e + lane];                                           \
            for (int64_t e = whole; e < experts; e++)                                                                 \
                left += features[e] * features[e];                                                                    \
        }                                                                                                             \
        for (int lane = 0; lane < LANES; lane++)                                                                      \
            sum += parts[lane];                                                                                       \
        return sum + left;                                                                                            \
    }

FEATURES(uint8_t)
FEATURES(uint16_t)
FEATURES(uint32_t)

/* products [rows] of the features with each of some vectors; the features' sum of squares. */
double coterie_similar(const void *counts, int64_t item, const int64_t *layers, int64_t kept, int64_t experts,
                       const float *weights, float *features, const float *vectors, int64_t rows, double *products)
{
    double squares;
    if (item == 1)
        squares = features_uint8_t(counts, layers, kept, experts, weights, features);
    else if (item == 2)
        squares = features_uint16_t(counts, layers, kept, experts, weights, features);
    else
        squares = features_uint32_t(counts, layers, kept, experts, weights, features);
    coterie_products(vectors, rows, features, kept * experts, products);
    return squares;
}

/* --- base64 ---------------------------------------------------------------------------------------------------- */

/* Six bits, or 64 where a character is none of base64; by masks, since compilers make no vectors of choices. */
INLINE uint8_t six(uint8_t c)
{
    uint8_t upper = c - 'A', lower = c - 'a', digit = c - '0';
    uint8_t is_upper = -(upper < 26), is_lower = -(lower < 26), is_digit = -(digit < 10);
    uint8_t is_plus = -(c == '+'), is_slash = -(c == '/');
    uint8_t is_none = ~(is_upper | is_lower | is_digit | is_plus | is_slash);
    return (is_upper & upper) | (is_lower & (lower + 26)) | (is_digit & (digit + 52)) | (is_plus & 62) |
           (is_slash & 63) | (is_none & 64);
}

/* The bytes of a multiple of four characters; 0 if one is not of base64. */
INLINE int decode(const uint8_t *restrict text, int64_t chars, uint8_t *restrict bytes)
{
    uint8_t wrong = 0;
    for (int64_t start = 0; start < chars; start += BLOCK) {
        uint8_t sixes[BLOCK];
        uint32_t words[BLOCK / 4];
        int64_t count = least(BLOCK, chars - start);
        for (int64_t i = 0; i < count; i++) {
            sixes[i] = six(text[start + i]);
            wrong |= sixes[i];
        }
        memcpy(words, sixes, count);
        for (int64_t i = 0; i < count / 4; i++) { /* the low byte is the first, here and in what comes out */
            uint32_t w = words[i];
            uint32_t a = w & 63, b = w >> 8 & 63, c = w >> 16 & 63, d = w >> 24 & 63;
            words[i] = (a << 2 | b >> 4) | ((b & 15) << 4 | c >> 2) << 8 | ((c & 3) << 6 | d) << 16;
        }
        uint8_t *to = bytes + start / 4 * 3;
        for (int64_t i = 0; i < count / 4 - 1; i++)
            memcpy(to + 3 * i, words + i, 4); /* the fourth is the next one's to overwrite */
        memcpy(to + count / 4 * 3 - 3, words + count / 4 - 1, 3);
    }
    return wrong < 64;
}

/* Decode base64 of `size` > 0 bytes exactly, with its padding; 0 if it is not that. */
int coterie_base64(const uint8_t *text, int64_t chars, uint8_t *bytes, int64_t size)
{
    if (chars != (size + 2) / 3 * 4)
        return 0;
    int64_t whole = (size - 1) / 3 * 4, left = size - whole / 4 * 3; /* the last four may hold padding */
    uint8_t last[4] = {'A', 'A', 'A', 'A'}, end[3];
    for (int64_t i = 0; i < 4; i++)
        if (i <= left)
            last[i] = text[whole + i];
        else if (text[whole + i] != '=')
            return 0;
    if (!decode(text, whole, bytes) || !decode(last, 4, end))
        return 0;
    memcpy(bytes + whole / 4 * 3, end, left);
    return 1;
}

/* 2, the version of what is above; 0 if this processor lacks the instructions. */
int coterie_interface(void)
{
#if defined __AVX512F__
    if (!(__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
          __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
          __builtin_cpu_supports("avx512vl")))
        return 0;
#endif
#if defined __AVX2__
    if (!(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2")))
        return 0;
#endif
    return 2;
}
