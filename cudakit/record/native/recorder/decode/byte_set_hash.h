/* A hash of a set of bytes that does not depend on how the set is divided into ranges.
 *
 * The hash is the sum of X^a over the addresses a of the bytes, multiplied by X - 1, modulo the prime 2^61 - 1: a
 * polynomial evaluated at the fixed point X. The sum over a range of addresses is then X^end - X^begin. Two different
 * sets with addresses below 2^48 have equal hashes for at most 2^48 of the 2^61 points. */
#ifndef CK_BYTE_SET_HASH_H
#define CK_BYTE_SET_HASH_H

#include <stdint.h>

/* Return the hash of ``count`` pieces of ``bytes`` bytes: the first begins at ``lo``, each next one ``stride`` bytes
 * later. The pieces do not overlap. */
uint64_t byte_set_hash(uint64_t lo, uint64_t bytes, uint64_t stride, uint64_t count);

/* Return the hash of the union of two sets without common bytes. */
uint64_t byte_set_hash_of_union(uint64_t hash, uint64_t other_hash);

/* Return the hash of a set, multiplied by a number that distinguishes it from equal sets of another kind. */
uint64_t byte_set_hash_of_kind(uint64_t hash, uint64_t kind);

#endif
