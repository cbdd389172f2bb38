/* The arithmetic of a forward pass, float32, for coterie.modeling.native, which checks sizes and calls it.

   Every number is a sum of products taken one by one, in the order of the inner dimension, whatever the number of rows
   or columns computed beside it: tiles only decide which sums are held in registers together.  So a row has the same
   bits in every batch.  Multiplications and additions are fused where the machine does that, and then everywhere;
   the compiler must not choose (-ffp-contract=off).

   The file is compiled once for each level of instructions (LANES); `coterie_interface` says whether the processor has
   them.  Matrices are row by row; a leading dimension ("ld") is the distance of two rows in floats. */

#include <stdint.h>
#include <string.h>

#if defined __AVX512F__
#include <immintrin.h>
#define LANES 16
#define ROWS 8
#elif defined __AVX2__ && defined __FMA__
#include <immintrin.h>
#define LANES 8
#define ROWS 4
#else
#define LANES 4
#define ROWS 4
#endif

#define BLOCK 64   /* columns of a block of an expert's intermediate dimension, as experts.BLOCK */
#define CHUNK 64   /* tokens of an expert that pass its weights together */
#define KV_TILE 64 /* positions whose scores are held at once */
#define QUERIES 64 /* rows of queries that go along the cache together, if no token alone has more */

#define UNROLL _Pragma("GCC unroll 8")
#define INLINE static inline __attribute__((always_inline))

typedef float Vec __attribute__((vector_size(4 * LANES), may_alias));
typedef uint32_t Bits __attribute__((vector_size(4 * LANES), may_alias));
typedef float Loose __attribute__((vector_size(4 * LANES), may_alias, aligned(4))); /* a Vec anywhere in memory */

INLINE Vec load(const float *from) { return *(const Loose *)from; }
INLINE void store(float *to, Vec value) { *(Loose *)to = value; }
INLINE Vec splat(float value) { return value - (Vec){0}; }
INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

INLINE Vec fused(Vec a, Vec b, Vec c)
{
#if LANES == 16
    return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif LANES == 8
    return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

INLINE float fused_one(float a, float b, float c)
{
#if LANES > 4
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

/* The sum over lanes, by halves. */
INLINE float sum_lanes(Vec value)
{
    for (int half = LANES / 2; half; half /= 2)
        for (int lane = 0; lane < half; lane++)
            value[lane] += value[lane + half];
    return value[0];
}

INLINE float max_lanes(Vec value)
{
    float top = value[0];
    for (int lane = 1; lane < LANES; lane++)
        top = value[lane] > top ? value[lane] : top;
    return top;
}

/* exp(x) = 2^n exp(r), n = round(x / ln 2), by the Taylor series of exp to the seventh power: |r| <= ln(2) / 2, so what
   is left out is below 1e-8 of the result.  0 below -87, infinite above 88. */
INLINE Vec exponential(Vec x)
{
    const Vec magic = splat(12582912.0f); /* 1.5 * 2^23: its last bit is worth 1 */
    const Bits low = (Bits)(x < splat(-87.0f)), high = (Bits)(x > splat(88.0f));
    Vec shifted = fused(x, splat(1.44269504f), magic), n = shifted - magic;
    Vec r = fused(n, splat(-0.693145752f), x); /* ln 2 in two parts, the first with few bits: n times it is exact */
    r = fused(n, splat(-1.42860677e-6f), r);
    Vec sum = splat(1.0f / 5040);
    sum = fused(sum, r, splat(1.0f / 720));
    sum = fused(sum, r, splat(1.0f / 120));
    sum = fused(sum, r, splat(1.0f / 24));
    sum = fused(sum, r, splat(1.0f / 6));
    sum = fused(sum, r, splat(0.5f));
    sum = fused(sum, r, splat(1.0f));
    sum = fused(sum, r, splat(1.0f));
    Bits bits = (Bits)sum + (((Bits)shifted - (Bits)magic) << 23);
    return (Vec)((bits & ~low & ~high) | (high & 0x7f800000));
}

/* --- products -------------------------------------------------------------------------------------------------- */

/* c [height, vecs * LANES] = a [height, inner] b [inner, ..], added to what c holds if `add`. */
INLINE void tile(const int height, const int vecs, int64_t inner, const float *a, int64_t lda, const float *b,
                 int64_t ldb, float *c, int64_t ldc, int add)
{
    Vec sums[ROWS][8];
    UNROLL for (int row = 0; row < height; row++)
        UNROLL for (int vec = 0; vec < vecs; vec++)
            sums[row][vec] = add ? load(c + row * ldc + vec * LANES) : splat(0);
    for (int64_t k = 0; k < inner; k++) {
        Vec left[ROWS];
        UNROLL for (int row = 0; row < height; row++)
            left[row] = splat(a[row * lda + k]);
        UNROLL for (int vec = 0; vec < vecs; vec++) {
            Vec right = load(b + k * ldb + vec * LANES);
            UNROLL for (int row = 0; row < height; row++)
                sums[row][vec] = fused(left[row], right, sums[row][vec]);
        }
    }
    UNROLL for (int row = 0; row < height; row++)
        UNROLL for (int vec = 0; vec < vecs; vec++)
            store(c + row * ldc + vec * LANES, sums[row][vec]);
}

/* As many vectors beside one another as there are registers for: a matrix is read nearly as it lies in memory. */
#if ROWS == 8
#define WIDE(height) (height <= 3 ? 8 : height <= 6 ? 4 : 2)
#else
#define WIDE(height) (height <= 1 ? 8 : height <= 3 ? 4 : 2)
#endif

/* The same for any number of columns. */
INLINE void strip(const int height, int64_t inner, int64_t columns, const float *a, int64_t lda, const float *b,
                  int64_t ldb, float *c, int64_t ldc, int add)
{
    int64_t column = 0;
    for (; column + WIDE(height) * LANES <= columns; column += WIDE(height) * LANES)
        tile(height, WIDE(height), inner, a, lda, b + column, ldb, c + column, ldc, add);
    for (; column + 2 * LANES <= columns; column += 2 * LANES)
        tile(height, 2, inner, a, lda, b + column, ldb, c + column, ldc, add);
    for (; column + LANES <= columns; column += LANES)
        tile(height, 1, inner, a, lda, b + column, ldb, c + column, ldc, add);
    for (; column < columns; column++)
        for (int row = 0; row < height; row++) {
            float sum = add ? c[row * ldc + column] : 0;
            for (int64_t k = 0; k < inner; k++)
                sum = fused_one(a[row * lda + k], b[k * ldb + column], sum);
            c[row * ldc + column] = sum;
        }
}

/* c [rows, columns] = a [rows, inner] b [inner, columns], added to what c holds if `add`: in as few strips as there
   can be, of about equal heights. */
static void multiply(int64_t rows, int64_t inner, int64_t columns, const float *a, int64_t lda, const float *b,
                     int64_t ldb, float *c, int64_t ldc, int add)
{
    for (int64_t strips = (rows + ROWS - 1) / ROWS, height; strips; strips--) {
        switch (height = (rows + strips - 1) / strips) {
#define CASE(n) case n: strip(n, inner, columns, a, lda, b, ldb, c, ldc, add); break;
            CASE(1) CASE(2) CASE(3) CASE(4)
#if ROWS == 8
            CASE(5) CASE(6) CASE(7) CASE(8)
#endif
#undef CASE
        }
        rows -= height, a += height * lda, c += height * ldc;
    }
}

/* `rows [count, inner]` times a matrix stored as `blocks [.., inner, width]`: `out [count, blocks * width]`. */
void coterie_product(int64_t count, int64_t inner, int64_t blocks, int64_t width, const float *rows,
                     const float *matrix, float *out)
{
    for (int64_t block = 0; block < blocks; block++)
        multiply(count, inner, width, rows, inner, matrix + block * inner * width, width, out + block * width,
                 blocks * width, 0);
}

/* `rows [count, heads, inner]`, each head times its own of `matrices [heads, inner, columns]`. */
void coterie_product_by_head(int64_t count, int64_t heads, int64_t inner, int64_t columns, const float *rows,
                             const float *matrices, float *out)
{
    for (int64_t head = 0; head < heads; head++)
        multiply(count, inner, columns, rows + head * inner, heads * inner, matrices + head * inner * columns, columns,
                 out + head * columns, heads * columns, 0);
}

/* --- norm and rotation ----------------------------------------------------------------------------------------- */

/* x / sqrt(mean(x^2) + eps) * weight of each head: `values [tokens, heads, size]`, tokens `ld` apart, to `out`. */
void coterie_norm(int64_t tokens, int64_t heads, int64_t size, int64_t ld, float eps, const float *values,
                  const float *weight, float *restrict out)
{
    for (int64_t row = 0; row < tokens * heads; row++, out += size) {
        const float *x = values + row / heads * ld + row % heads * size;
        Vec sums = splat(0);
        int64_t column = 0;
        for (; column + LANES <= size; column += LANES)
            sums = fused(load(x + column), load(x + column), sums);
        float sum = sum_lanes(sums);
        for (; column < size; column++)
            sum = fused_one(x[column], x[column], sum);
        float factor = 1 / __builtin_sqrtf(sum / size + eps);
        for (column = 0; column < size; column++)
            out[column] = x[column] * factor * weight[column];
    }
}

/* (a, b) to (a cos - b sin, b cos + a sin), b half a head after a: `values [tokens, heads, 2 * half]`, tokens `ld`
   apart, by angles `[tokens, half]`, to `out`. */
void coterie_rotate(int64_t tokens, int64_t heads, int64_t half, int64_t ld, const float *values, const float *cos,
                    const float *sin, float *restrict out)
{
    for (int64_t token = 0; token < tokens; token++, values += ld, cos += half, sin += half)
        for (int64_t head = 0; head < heads; head++, out += 2 * half) {
            const float *a = values + head * 2 * half, *b = a + half;
            for (int64_t i = 0; i < half; i++) {
                out[i] = a[i] * cos[i] - b[i] * sin[i];
                out[half + i] = b[i] * cos[i] + a[i] * sin[i];
            }
        }
}

/* --- feed-forwards --------------------------------------------------------------------------------------------- */

/* Of experts whose two parts are bounded and have biases, as those of GPT-OSS. */
typedef struct {
    const float *inward, *outward; /* biases [blocks, 2 * BLOCK] and [hidden] */
    float slope, limit;
} Bounded;

INLINE Vec at_most(Vec value, Vec limit)
{
    Bits above = (Bits)(value > limit);
    return (Vec)(((Bits)limit & above) | ((Bits)value & ~above));
}

INLINE Vec sigmoid_times(Vec slope, Vec value) { return value / (splat(1) + exponential(-(slope * value))); }

/* silu(g) * u; or, with `bias` of a block, g / (1 + exp(-slope g)) * (u + 1), for g at most and u within the limit. */
INLINE Vec gated_product(Vec gate, Vec up, const Bounded *bounded, const float *bias)
{
    if (!bias)
        return sigmoid_times(splat(1), gate) * up;
    Vec limit = splat(bounded->limit);
    gate = at_most(gate + load(bias), limit);
    up = -at_most(-at_most(up + load(bias + BLOCK), limit), limit);
    return sigmoid_times(splat(bounded->slope), gate) * (up + splat(1));
}

/* y = (silu(x W_gate) * (x W_up)) W_down of one expert, block by block: blocks of zeros leave y as it was. */
static void feed_forward(int64_t rows, int64_t hidden, int64_t blocks, const float *x, const float *gate_up,
                         const float *down, const Bounded *bounded, float *y)
{
    float inner[CHUNK * 2 * BLOCK], gated[CHUNK * BLOCK];
    for (int64_t first = 0; first < rows; first += CHUNK, x += CHUNK * hidden, y += CHUNK * hidden) {
        int64_t count = least(rows - first, CHUNK);
        for (int64_t block = 0; block < blocks; block++) {
            multiply(count, hidden, 2 * BLOCK, x, hidden, gate_up + block * hidden * 2 * BLOCK, 2 * BLOCK, inner,
                     2 * BLOCK, 0);
            const float *bias = bounded ? bounded->inward + block * 2 * BLOCK : 0;
            for (int64_t row = 0; row < count; row++)
                for (int64_t lane = 0; lane < BLOCK; lane += LANES) {
                    Vec gate = load(inner + row * 2 * BLOCK + lane), up = load(inner + row * 2 * BLOCK + BLOCK + lane);
                    store(gated + row * BLOCK + lane, gated_product(gate, up, bounded, bias ? bias + lane : 0));
                }
            multiply(count, BLOCK, hidden, gated, BLOCK, down + block * BLOCK * hidden, hidden, y, hidden, block > 0);
        }
        for (int64_t row = 0; bounded && row < count; row++)
            for (int64_t column = 0; column < hidden; column++)
                y[row * hidden + column] += bounded->outward[column];
    }
}

void coterie_dense(int64_t rows, int64_t hidden, int64_t blocks, const float *x, const float *gate_up,
                   const float *down, float *y)
{
    feed_forward(rows, hidden, blocks, x, gate_up, down, 0, y);
}

/* `out [tokens, hidden]`: each token's sum of weight times expert, in the order of its choice, without those of id -1.

   `inward [experts, blocks, 2 * BLOCK]` and `outward [experts, hidden]` are 0 where experts are not bounded.
   Work: `bounds [experts + 1]`, `places [tokens * top_k]` and two of `[tokens * top_k, hidden]`. */
void coterie_routed(int64_t tokens, int64_t top_k, int64_t experts, int64_t hidden, int64_t blocks, const float *rows,
                    const int64_t *ids, const float *weights, const float *gate_up, const float *down,
                    const float *inward, const float *outward, float slope, float limit,
                    int64_t *bounds, int64_t *places, float *gathered, float *each, float *out)
{
    int64_t pairs = tokens * top_k, size = hidden * sizeof(float);
    memset(bounds, 0, (experts + 1) * sizeof *bounds);
    for (int64_t pair = 0; pair < pairs; pair++)
        if (ids[pair] >= 0)
            bounds[ids[pair] + 1]++;
    for (int64_t expert = 0; expert < experts; expert++)
        bounds[expert + 1] += bounds[expert];
    for (int64_t pair = 0; pair < pairs; pair++) { /* from here on, bounds[e] is where e's next row goes */
        if (ids[pair] < 0)
            continue;
        places[pair] = bounds[ids[pair]]++;
        memcpy(gathered + places[pair] * hidden, rows + pair / top_k * hidden, size);
    }
    for (int64_t expert = 0, start = 0; expert < experts; start = bounds[expert++]) {
        Bounded bounded = {inward + expert * blocks * 2 * BLOCK, outward + expert * hidden, slope, limit};
        feed_forward(bounds[expert] - start, hidden, blocks, gathered + start * hidden,
                     gate_up + expert * blocks * hidden * 2 * BLOCK, down + expert * blocks * BLOCK * hidden,
                     inward ? &bounded : 0, each + start * hidden);
    }
    memset(out, 0, tokens * size);
    for (int64_t pair = 0; pair < pairs; pair++) {
        if (ids[pair] < 0)
            continue;
        const float *from = each + places[pair] * hidden;
        float *to = out + pair / top_k * hidden, weight = weights[pair];
        for (int64_t column = 0; column < hidden; column++)
            to[column] += weight * from[column];
    }
}

/* --- attention ------------------------------------------------------------------------------------------------- */

typedef struct {
    int64_t heads, share, key_dim, value_dim; /* as attention.CacheHeads */
    int64_t width;                            /* floats of a token in a layer of the cache */
    int64_t values;                           /* where a token's values begin: after the keys, or 0 if latent */
    int64_t block_size, block_floats;         /* tokens of a block; floats of one, with all layers */
    int64_t window;                           /* positions that a token sees */
} Cache;

/* One head's queries of one request, at positions that follow one another. */
typedef struct {
    const float *cache;   /* of the layer */
    const int64_t *table; /* blocks of the request */
    int64_t head, tokens, position;
    float *queries, *keys;  /* [rows, key_dim], [key_dim, KV_TILE] */
    float *scores, *output; /* [rows, KV_TILE], [rows, value_dim] */
    float *top, *total;     /* [rows] each: largest score so far, sum of exp(score - top) */
} Walk;

/* Tokens from `position` on, before `end`, that lie side by side in the cache, and where. */
INLINE int64_t piece(const Cache *g, const Walk *w, int64_t position, int64_t end, const float **where)
{
    int64_t offset = position % g->block_size;
    *where = w->cache + w->table[position / g->block_size] * g->block_floats + offset * g->width;
    return least(g->block_size - offset, end - position);
}

/* Ask for keys and values before they are needed: blocks lie all over memory. */
static void fetch(const Cache *g, const Walk *w, int64_t start, int64_t end)
{
    const float *where;
    for (int64_t count; start < end; start += count) {
        count = piece(g, w, start, end, &where);
        for (int64_t line = 0; line < count * g->width; line += 16)
            __builtin_prefetch(where + line, 0, 2);
    }
}

/* One row of scores [KV_TILE], of which [from, to) are seen, to exp(score - top); its output so far is scaled. */
static void soften(float *scores, int64_t from, int64_t to, float *top, float *total, float *output, int64_t size)
{
    for (int64_t place = 0; place < from; place++)
        scores[place] = -__builtin_inff();
    for (int64_t place = to; place < KV_TILE; place++)
        scores[place] = -__builtin_inff();
    Vec highest = splat(*top), sums = splat(0);
    for (int64_t place = 0; place < KV_TILE; place += LANES) {
        Vec other = load(scores + place);
        Bits higher = (Bits)(other > highest);
        highest = (Vec)(((Bits)other & higher) | ((Bits)highest & ~higher));
    }
    float new_top = max_lanes(highest);
    for (int64_t place = 0; place < KV_TILE; place += LANES) {
        Vec factors = exponential(load(scores + place) - splat(new_top));
        store(scores + place, factors);
        sums += factors;
    }
    float shrink = exponential(splat(*top - new_top))[0];
    *top = new_top;
    *total = *total * shrink + sum_lanes(sums);
    if (shrink != 1)
        for (int64_t column = 0; column < size; column++)
            output[column] *= shrink;
}

/* The positions [start, end), at most KV_TILE, for the rows that see any of them. */
static void attend_tile(const Cache *g, const Walk *w, int64_t start, int64_t end)
{
    int64_t first = start > w->position ? (start - w->position) * g->share : 0; /* earlier tokens see nothing here */
    int64_t rows = w->tokens * g->share - first, count;
    const float *where;
    for (int64_t at = start; at < end; at += count) {
        count = piece(g, w, at, end, &where);
        for (int64_t token = 0; token < count; token++)
            for (int64_t d = 0; d < g->key_dim; d++)
                w->keys[d * KV_TILE + at - start + token] = where[token * g->width + w->head * g->key_dim + d];
    }
    float *scores = w->scores + first * KV_TILE, *output = w->output + first * g->value_dim;
    multiply(rows, g->key_dim, KV_TILE, w->queries + first * g->key_dim, g->key_dim, w->keys, KV_TILE, scores, KV_TILE,
             0);
    for (int64_t row = 0; row < rows; row++) {
        int64_t position = w->position + (first + row) / g->share, hidden = position - g->window + 1 - start;
        soften(scores + row * KV_TILE, hidden < 0 ? 0 : least(hidden, KV_TILE), least(position + 1, end) - start,
               w->top + first + row, w->total + first + row, output + row * g->value_dim, g->value_dim);
    }
    for (int64_t at = start; at < end; at += count) {
        count = piece(g, w, at, end, &where);
        multiply(rows, count, g->value_dim, scores + at - start, KV_TILE, where + g->values + w->head * g->value_dim,
                 g->width, output, g->value_dim, 1);
    }
}

/* `queries [tokens, heads, share, key_dim]` of a request along the cache; `out [tokens, heads, share, value_dim]`. */
static void walk(const Cache *g, Walk *w, const float *queries, float *out)
{
    int64_t of_head = g->share * g->key_dim, of_output = g->share * g->value_dim, rows = w->tokens * g->share;
    for (int64_t token = 0; token < w->tokens; token++)
        memcpy(w->queries + token * of_head, queries + (token * g->heads + w->head) * of_head, of_head * sizeof(float));
    memset(w->output, 0, rows * g->value_dim * sizeof(float));
    for (int64_t row = 0; row < rows; row++)
        w->top[row] = -1e30f, w->total[row] = 0; /* below every score, and finite: -inf minus -inf is no number */
    int64_t end = w->position + w->tokens, start = w->position - g->window + 1;
    start = start < 0 ? 0 : start / KV_TILE * KV_TILE;
    if (!w->head)
        fetch(g, w, start, least(start + KV_TILE, end));
    for (; start < end; start += KV_TILE) {
        if (!w->head)
            fetch(g, w, start + KV_TILE, least(start + 2 * KV_TILE, end));
        attend_tile(g, w, start, least(start + KV_TILE, end));
    }
    for (int64_t row = 0; row < rows; row++) {
        float *to = out + (row / g->share * g->heads + w->head) * of_output + row % g->share * g->value_dim;
        for (int64_t column = 0; column < g->value_dim; column++)
            to[column] = w->output[row * g->value_dim + column] / w->total[row];
    }
}

/* Attention of a step's requests, one after the other.

   `requests [count, 4]`: a request's first token in the step, how many it has, the first one's position, and where its
   blocks begin in `tables`.  Work: floats for max(share, QUERIES) rows of a `Walk` and its keys. */
void coterie_attend(int64_t count, const Cache *g, const int64_t *requests, const int64_t *tables,
                    const float *queries, const float *cache, float *work, float *out)
{
    int64_t rows = g->share > QUERIES ? g->share : QUERIES, together = rows / g->share;
    Walk w = {.cache = cache, .queries = work};
    w.keys = w.queries + rows * g->key_dim;
    w.scores = w.keys + g->key_dim * KV_TILE;
    w.output = w.scores + rows * KV_TILE;
    w.top = w.output + rows * g->value_dim;
    w.total = w.top + rows;
    for (; count; count--, requests += 4)
        for (w.head = 0; w.head < g->heads; w.head++)
            for (int64_t done = 0; done < requests[1]; done += together) {
                int64_t token = (requests[0] + done) * g->heads * g->share;
                w.tokens = least(together, requests[1] - done);
                w.position = requests[2] + done;
                w.table = tables + requests[3];
                walk(g, &w, queries + token * g->key_dim, out + token * g->value_dim);
            }
}

/* Version of these functions' arguments; 0 if the processor lacks the instructions that the file was compiled for. */
int coterie_interface(void)
{
#if LANES == 16
    if (!(__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
          __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
          __builtin_cpu_supports("avx512vl")))
        return 0;
#endif
#if LANES >= 8
    if (!(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2")))
        return 0;
#endif
    return 2;
}
