/* Prepared launches: what a call needs besides the addresses of its arrays and the values of its numbers. */
#ifndef CUDAKIT_FAST_CALL_PLANS_H
#define CUDAKIT_FAST_CALL_PLANS_H

#include "operands.h"

enum {
    MAX_PARAMETERS = 24,
    MAX_CONSTANT_BYTES = 1024, /* maximum size of all constants of one launch, in bytes */
    MAX_PLANS = 256,
    MAX_SCRATCH = 16 /* maximum number of streams that have scratch memory for one plan */
};

typedef struct {
    /* 'a' address, 's' scratch, 'c' constant, 'f' float, 'd' double, 'q' 64-bit integer, '?' bool, 'n' counter word */
    char kind;
    int operand; /* index of an operand, or of a word of the counter */
    int offset;  /* offset of a constant in the constants of the launch, in bytes */
} parameter;

typedef struct {
    word key[MAX_KEY_WORDS];
    int key_words;
    bool allocates; /* whether the outputs are new arrays */
    /* ArrayFactory, or Python function of a stream handle that returns a tuple of new outputs. NULL: the exchange API
     * allocates them. */
    PyObject *allocate;
    int operand_count, parameter_count, result_count;
    int results[MAX_OPERANDS];          /* operands that the call returns */
    bool is_output[MAX_OPERANDS];       /* operands that the kernel writes */
    int64_t first_offset[MAX_OPERANDS]; /* offset of the first byte of an array from its address */
    int64_t end_offset[MAX_OPERANDS];   /* offset of the byte after its last one */
    parameter parameters[MAX_PARAMETERS];
    char constants[MAX_CONSTANT_BYTES];
    handle function, context;
    int32_t device_id;
    unsigned blocks, threads;
    bool uses_counter; /* whether the launch reads and advances the counter of the FastCall object */
    word counter_step; /* number that a launch adds to this counter */
    int active_calls;  /* calls that use the plan, which must not be deleted meanwhile */
    bool uses_scratch;
    int scratch_count;
    struct {
        handle stream;
        word address;
    } scratch[MAX_SCRATCH];
} prepared_launch;

/* The counter of a random number generator. The GIL protects it. */
typedef struct {
    PyObject_HEAD
    word words[3];  /* position, sequence and seed */
    bool is_frozen; /* whether the position is now in device memory; the words here are then out of date */
} LaunchCounter;

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    LaunchCounter *counter; /* NULL for kernels without a counter */
    int input_count,
        output_count; /* numbers of arguments, and of outputs that `out` provides or the call allocates */
    int plan_count;
    prepared_launch *plans[MAX_PLANS]; /* the plan of the last call is the first one */
} FastCall;

/* Move the plan with a key to the front, and return the plan; return NULL if there is none. */
prepared_launch *find_plan(FastCall *self, const word *key, int word_count, bool allocates);

/* Return the address of a plan's scratch memory for a stream, or 0. */
word find_scratch(const prepared_launch *plan, handle stream);

/* Return whether an output shares memory with another array in a way that _call may refuse. */
bool has_overlap(const prepared_launch *plan, const operand *operands);

/* Implement FastCall._prepare(). */
PyObject *prepare(PyObject *object, PyObject *args);

/* Free a plan, and its reference to a Python function. */
void delete_plan(prepared_launch *plan);

#endif
