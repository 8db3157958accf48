/* What is made before anything is looked at, since making it may run Python: the garbage collection's. */
#ifndef CUDAKIT_HOT_STOCK_H
#define CUDAKIT_HOT_STOCK_H

#include "calls.h"

enum { MOST_EVENTS = 2 };

struct stock {
    PyObject *entry;               /* of a row; none yet in it */
    PyObject *events[MOST_EVENTS]; /* of the trace */
    PyObject *recorder;            /* borrowed; NULL where nothing is recorded */
};

/* Raises MemoryError. */
bool stock_up(struct stock *stock, struct calls *calls, int events);
void stock_drop(struct stock *stock);

/* See to it that there is a block for what will be left of another. Raises MemoryError. */
bool keep_spare(struct calls *calls);

/* Whether nobody is inside, and nothing is unusual but a recording without stacks. From here on to the changes no
 * Python runs. */
bool is_usual(struct stock *stock, struct calls *calls);

/* Fill the entry, which is given away. NULL is MemoryError. */
PyObject *entry_of(struct stock *stock, PyObject *size, PyObject *ptr, PyObject *block);

/* What there are events of, in the order in which they come. */
enum action { ALLOC, FREE_REQUESTED, FREE_COMPLETED, ACTION_COUNT };

/* Note the events of a block, from this one on as many as were made, to be appended to the trace by ``record``. */
bool will_record(struct changes *changes, struct stock *stock, enum action first, PyObject *block,
                 PyObject *requested);
void record(struct stock *stock);

/* Raises what importing the trace does. */
bool find_actions(void);

#endif
