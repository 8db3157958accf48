#include "decode/byte_set_hash.h"

#include <stdbool.h>

#define PRIME ((UINT64_C(1) << 61) - 1)
/* The point at which the polynomials of the hash are evaluated: any number below the prime. */
#define X UINT64_C(0x13E3779B97F4A7C5)

static uint64_t add(uint64_t left, uint64_t right)
{
    const uint64_t sum = left + right;
    return sum >= PRIME ? sum - PRIME : sum;
}

static uint64_t multiply(uint64_t left, uint64_t right)
{
    const unsigned __int128 product = (unsigned __int128)left * right;
    const uint64_t folded = ((uint64_t)product & PRIME) + (uint64_t)(product >> 61);
    return folded >= PRIME ? folded - PRIME : folded;
}

/* Return X to a power. The table has X to the powers i * 256^j. */
static uint64_t power_of_x(uint64_t exponent)
{
    static uint64_t table[8][256]; /* protected by the reader lock */
    static bool is_filled;
    for (uint64_t row = 0, base = X; !is_filled && row < 8; row++) {
        table[row][0] = 1;
        for (int i = 1; i < 256; i++)
            table[row][i] = multiply(table[row][i - 1], base);
        base = multiply(table[row][255], base);
    }
    is_filled = true;
    uint64_t power = 1;
    for (int row = 0; exponent; row++, exponent >>= 8)
        power = multiply(power, table[row][exponent & 255]);
    return power;
}

/* Return 1 + base + base^2 + ..., with ``count`` terms, by doubling the number of terms. */
static uint64_t geometric_sum(uint64_t base, uint64_t count)
{
    uint64_t sum = 0,
             power = 1; /* the sum of the first n terms, and base^n, where n has the upper bits of count */
    for (int bit = 63 - __builtin_clzll(count | 1); bit >= 0; bit--) {
        sum = add(sum, multiply(sum, power));
        power = multiply(power, power);
        if (count >> bit & 1) {
            sum = add(sum, power);
            power = multiply(power, base);
        }
    }
    return sum;
}

uint64_t byte_set_hash(uint64_t lo, uint64_t bytes, uint64_t stride, uint64_t count)
{
    const uint64_t begin = power_of_x(lo), end = power_of_x(lo + bytes);
    const uint64_t piece = add(end, PRIME - begin);
    return count == 1 ? piece : multiply(piece, geometric_sum(power_of_x(stride), count));
}

uint64_t byte_set_hash_of_union(uint64_t hash, uint64_t other_hash)
{
    return add(hash, other_hash);
}

uint64_t byte_set_hash_of_kind(uint64_t hash, uint64_t kind)
{
    return multiply(hash, 1 + kind % (PRIME - 1));
}
