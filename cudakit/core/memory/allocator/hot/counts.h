/* What is counted of an allocation and of a free (tally.py, ledger.py). */
#ifndef CUDAKIT_HOT_COUNTS_H
#define CUDAKIT_HOT_COUNTS_H

#include "slots.h"

/* Note by how much the free pieces of split segments change, and their peaks; as Tally.pieces_changed. */
bool will_count_pieces(struct changes *changes, PyObject *tally, int64_t count, int64_t bytes);

/* Note what a block adds that is handed out, and return its weight; NULL where the peaks would rise, or something
 * fails. */
PyObject *will_charge(struct changes *changes, PyObject *block, PyObject *tally, PyObject *size,
                      PyObject *requested);

/* Note that a block is counted that was not: of the front cache. */
bool will_charge_again(struct changes *changes, PyObject *ledger, PyObject *block);

/* Note that a block is counted no more. */
void will_discharge(struct changes *changes, PyObject *ledger, PyObject *block);

bool find_constants(void);

#endif
