/* The records of a trace, in the layout of ``cudakit/trace/trace_file.py``, which documents each field. A record has 96
 * bytes: 40 bytes of common fields, then the fields of its kind. Other ids refer to ids.h, graphs.h and spool.h. */
#ifndef CK_RECORD_H
#define CK_RECORD_H

#include <stdint.h>

enum {
    KIND_ALLOC = 1,
    KIND_FREE = 2,
    KIND_LAUNCH = 3,
    KIND_ACCESS = 4,
    KIND_COPY = 5,
    KIND_FILL = 6,
    KIND_STREAM_CREATE = 7,
    KIND_STREAM_DESTROY = 8,
    KIND_EVENT_RECORD = 9,
    KIND_STREAM_WAIT = 10,
    KIND_EVENT_SYNC = 11,
    KIND_EVENT_QUERY_OK = 12,
    KIND_STREAM_SYNC = 13,
    KIND_CONTEXT_SYNC = 15,
    KIND_HOST_CALL = 16,
    KIND_GRAPH_NODE = 19,
    KIND_GRAPH_EDGE = 20,
    KIND_GRAPH_LAUNCH = 21,
    KIND_MEMOP = 22,
    KIND_RANGE_PUSH = 23,
    KIND_RANGE_POP = 24,
    KIND_MARK = 25,
    KIND_GAP = 26,
    KIND_ACCESSED = 27,
    KIND_ARENAS = 28,
    KIND_OUT_OF_MEMORY = 29,
    KIND_API_CALL = 30,
    KIND_KERNEL_RUN = 31,
    KIND_COPY_RUN = 32,
    KIND_FILL_RUN = 33,
    KIND_GRAPH_NODE_SITE = 35,
    KIND_PROFILE_WINDOW = 36,
    KIND_DEVICE_INFO = 37,
    KIND_COMMUNICATOR = 38,
    KIND_COLLECTIVE = 39,
    KIND_TEMPLATE = 42,
    KIND_TEMPLATE_POINTERS = 43,
    KIND_LAUNCH_DELAYED = 44,
    KIND_GRAPH_DESTROY = 45,
};

enum {
    ALLOCATION_SYNC = 1,
    ALLOCATION_STREAM_ORDERED = 2,
    ALLOCATION_VIRTUAL = 3,
    ALLOCATION_PINNED = 4,
    ALLOCATION_MANAGED = 5
};
enum { ALLOCATION_GRAPH = 6 };
enum { LAYER_DRIVER = 1, LAYER_POOL = 2 };
enum { MODE_READ = 1, MODE_WRITE = 2, MODE_ATOMIC = 4 };
enum {
    PRECISION_MERGED = 0,
    PRECISION_EXACT = 1,
    PRECISION_SUMMARY = 2,
    PRECISION_ASSUMED = 3,
    PRECISION_UNCERTAIN = 4
};
enum { STREAM_BLOCKING = 1, STREAM_NONBLOCKING = 2, STREAM_PER_THREAD = 3, STREAM_LEGACY = 4 };
enum { HOST_TO_DEVICE = 1, DEVICE_TO_HOST = 2, DEVICE_TO_DEVICE = 3, HOST_TO_HOST = 4 };
enum { HOST_NONE = 0, HOST_PINNED = 1, HOST_PAGEABLE = 2 };
enum {
    NODE_TYPE_EMPTY,
    NODE_TYPE_LAUNCH,
    NODE_TYPE_COPY,
    NODE_TYPE_FILL,
    NODE_TYPE_ALLOC,
    NODE_TYPE_FREE,
    NODE_TYPE_HOST,
    NODE_TYPE_MEMOP
};
enum { FLAG_WAIT = 1, FLAG_WRITE = 2 };
enum { TEMPLATE_CHECK_NONE = 0, TEMPLATE_CHECK_EQUAL = 1, TEMPLATE_CHECK_DIFFERENT = 2 };
enum { POINTERS_PER_RECORD = 7 };
enum { PHASE_BEGIN = 1, PHASE_END = 2 };
enum {
    COLLECTIVE_UNKNOWN,
    COLLECTIVE_ALL_REDUCE,
    COLLECTIVE_ALL_GATHER,
    COLLECTIVE_REDUCE_SCATTER,
    COLLECTIVE_BROADCAST,
    COLLECTIVE_REDUCE,
    COLLECTIVE_SEND,
    COLLECTIVE_RECEIVE
};
enum { DATATYPE_UNKNOWN = 0, DATATYPE_FLOAT8_E5M2 = 12 }; /* a datatype is the number in ncclDataType_t plus 1 */
enum { MEMORY_KIND_MANAGED_STATIC = 7 };                  /* largest kind of memory at one end of a copy */

typedef struct {
    uint64_t seq;
    int64_t time_ns;
    uint32_t thread;
    uint32_t program_call; /* number of the call in the program's own code (walker.h); 0 if it is unknown */
    uint32_t stream, context, site;
    int16_t device;
    uint16_t kind;
    union {
        struct {
            uint64_t address, size_bytes;
            uint8_t allocation_kind, layer;
            uint32_t pool;            /* text id of the pool's name; 0 for the driver */
            uint64_t requested_bytes; /* 0: all bytes of the block; allocations only */
        } memory;
        struct {
            uint32_t name, grid[3], block[3];
            uint8_t pending;
            uint32_t template_id; /* template with the accesses of this launch; 0: its own accesses follow */
            uint8_t is_relative;  /* the template is of a launch with other pointers */
            uint8_t is_checked;   /* the template is contiguous, and was checked next to unordered work */
            uint8_t
                is_unordered; /* unordered with earlier work, but not recorded, because the patch was removed */
        } launch;
        struct {
            uint64_t lo, hi;
            uint8_t mode, precision;
            int64_t stride_bytes;
            uint64_t count;
            uint32_t node;
        } access;
        struct {
            uint64_t destination, source, size_bytes, rows;
            uint64_t destination_pitch_bytes, source_pitch_bytes;
            uint8_t direction, host, asynchronous;
        } copy;
        struct {
            uint64_t address, size_bytes, rows, pitch_bytes;
            uint8_t asynchronous;
        } fill;
        struct {
            uint8_t flag;
            int16_t priority;
        } stream_create;
        struct {
            uint32_t event;
        } event;
        struct {
            uint32_t graph, node;
            uint8_t node_type;
            uint32_t name;
        } node;
        struct {
            uint32_t graph, before, after;
        } edge;
        struct {
            uint32_t graph, executable, pending, template_id;
            uint8_t is_checked, is_unordered; /* the same meaning as in ``launch`` */
        } graph_launch;
        struct {
            uint32_t graph, executable;
        } graph_destroy;
        struct {
            uint64_t address;
            uint8_t flag;
        } memop;
        struct {
            uint8_t phase;
            uint32_t event; /* id of the event that was recorded before the host function was enqueued */
        } host_call;
        struct {
            uint32_t name, domain; /* text ids */
            uint64_t number;       /* number of a range of the process; 0: a range of the thread */
            uint8_t is_copy;
        } range_push;
        struct {
            uint32_t domain; /* text id */
            uint64_t number;
            uint8_t is_copy;
        } range_pop;
        struct {
            uint32_t name, domain; /* text ids */
        } mark;
        struct {
            uint32_t reason; /* text id */
            uint64_t count;
        } gap;
        struct {
            uint32_t node;
            uint8_t exact;
        } accessed;
        struct {
            /* template that the accesses become, or that is forgotten if the call is not a launch; 0 without a check:
             * all are forgotten */
            uint32_t template_id;
            uint8_t check;
        } access_template;
        struct {
            uint64_t pointers[POINTERS_PER_RECORD]; /* the unused ones are 0 */
        } template_pointers;
        struct {
            uint64_t size_bytes;
        } arenas;
        struct {
            uint8_t pending; /* true at the begin of the delay, false at its end */
        } launch_delay;
        struct {
            uint64_t size_bytes, free_bytes;
            uint32_t pool; /* text id of the pool's name */
        } out_of_memory;
        struct {
            uint32_t function, correlation; /* function: text id */
            int64_t start_ns, end_ns;
            uint64_t size_bytes;
        } api_call;
        struct {
            uint32_t name, correlation; /* name: text id */
            int64_t start_ns, end_ns;
            uint64_t graph_node;
            uint32_t grid[3];
            uint16_t block[3], registers;
            uint32_t shared_bytes;
        } kernel_run;
        struct {
            int64_t start_ns, end_ns;
            uint64_t size_bytes;
            uint32_t correlation;
            int16_t peer_device;
            uint8_t direction, source_memory, destination_memory;
            uint64_t graph_node;
        } copy_run;
        struct {
            int64_t start_ns, end_ns;
            uint64_t size_bytes;
            uint32_t correlation;
            uint64_t graph_node;
        } fill_run;
        struct {
            uint64_t graph_node;
        } graph_node_site;
        struct {
            uint8_t is_open;
            int32_t rank; /* -1: unknown */
        } profile_window;
        struct {
            uint32_t name, multiprocessors; /* name: text id */
            uint64_t memory_bytes;
            uint32_t threads_per_multiprocessor, blocks_per_multiprocessor, registers_per_multiprocessor;
            uint32_t shared_bytes_per_multiprocessor, reserved_shared_bytes_per_block;
        } device_info;
        struct {
            uint64_t hash;             /* hash of the communicator, the same in all ranks; 0: unknown */
            uint32_t communicator;     /* number of the communicator in this process */
            uint32_t name;             /* text id */
            int32_t rank, rank_count;  /* rank_count 0: unknown */
            uint32_t profiler_version; /* version of NCCL's profiler interface */
        } communicator;
        struct {
            uint64_t send, receive, element_count;
            uint32_t communicator, sequence, group;
            int32_t root;
            uint32_t graph, node;
            uint8_t function, datatype;
            uint32_t name; /* text id of the kernel's name */
        } collective;
        uint8_t kind_fields[56]; /* the fields of any kind, to clear them */
    };
} record;

_Static_assert(sizeof(record) == 96, "a record is 96 bytes");

#endif
