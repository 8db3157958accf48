/* The profiler plugin interface of NCCL: the structs and functions that are used. NCCL 2.23 and newer load a plugin
 * from the path in NCCL_PROFILER_PLUGIN and look up ``ncclProfiler_vN``, the newest version N first.
 *
 * Source of the interface: https://github.com/NVIDIA/nccl, plugins/profiler/README.md and the headers of versions 1 to 6
 * in src/include/plugin/profiler. Each struct has only the first members of NCCL's struct, up to the last one that is
 * read.
 */
#ifndef CK_NCCL_PROFILER_H
#define CK_NCCL_PROFILER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Types of events, as bits of the activation mask. */
enum {
    NCCL_GROUP = 1 << 0,
    NCCL_COLL = 1 << 1,
    NCCL_P2P = 1 << 2,
    NCCL_GROUP_API = 1 << 8,
    NCCL_COLL_API = 1 << 9,
    NCCL_P2P_API = 1 << 10,
    NCCL_KERNEL_LAUNCH = 1 << 11,
    NCCL_COPY_ENGINE_COLL = 1 << 12, /* new in version 6 of the interface */
};

/* An event in version 1 of the interface, in which functions and datatypes are numbers. */
typedef struct {
    uint8_t type;
    void *parent;
    int rank;
    union {
        struct {
            const char *name;
            uint64_t communicator_hash, sequence;
            uint8_t function;
            const void *send;
            void *receive;
            size_t count;
            int root;
            uint8_t datatype;
        } coll;
        struct {
            const char *name;
            uint64_t communicator_hash;
            uint8_t function;
            void *buffer;
            uint8_t datatype;
            size_t count;
            int peer;
        } p2p;
    };
} nccl_event_v1;

/* An event in versions 2 and 3 of the interface. */
typedef struct {
    uint8_t type;
    void *parent;
    int rank;
    union {
        struct {
            const char *name;
            uint64_t communicator_hash, sequence;
            const char *function;
            const void *send;
            void *receive;
            size_t count;
            int root;
            const char *datatype;
        } coll;
        struct {
            const char *name;
            uint64_t communicator_hash;
            const char *function;
            void *buffer;
            const char *datatype;
            size_t count;
            int peer;
        } p2p;
    };
} nccl_event_v2;

/* The members of a collective in version 4 and newer. */
typedef struct {
    uint64_t sequence;
    const char *function;
    const void *send;
    void *receive;
    size_t count;
    int root;
    const char *datatype;
} nccl_coll;

/* The members of a point-to-point operation in version 4 and newer. */
typedef struct {
    const char *function;
    void *buffer;
    const char *datatype;
    size_t count;
    int peer;
} nccl_p2p;

typedef struct {
    uint8_t type;
    void *parent;
    int rank;
    union {
        nccl_coll coll;
        nccl_p2p p2p;
    };
} nccl_event_v4;

/* An event in versions 5 and 6 of the interface. ``parent`` of a collective is the handle of its CollApi event, that
 * of a KernelLaunch, CollApi or P2pApi event is the handle of the GroupApi event. */
typedef struct {
    uint64_t type;
    void *parent;
    int rank;
    union {
        struct {
            const char *function;
            size_t count;
            const char *datatype;
            int root;
            void *stream;
            bool is_captured;
        } coll_api;
        struct {
            const char *function;
            size_t count;
            const char *datatype;
            void *stream;
            bool is_captured;
        } p2p_api;
        struct {
            uint64_t sequence;
            const char *function;
            const void *send;
            void *receive;
            size_t count;
            int root;
            const char *datatype;
            uint8_t channel_count, warp_count;
            const char *algorithm, *protocol;
            void *group; /* handle of the Group event */
        } coll;
        struct {
            const char *function;
            void *buffer;
            const char *datatype;
            size_t count;
            int peer;
            uint8_t channel_count;
            void *group;
        } p2p;
    };
} nccl_event_v5;

/* The functions of the plugin, in each version of the interface. All return 0, which is ncclSuccess. */
typedef struct {
    const char *name;
    int (*init)(void **context, int *activation_mask);
    int (*start_event)(void *context, void **handle, const void *event);
    int (*stop_event)(void *handle);
    int (*record_event_state)(void *handle, int state, const void *arguments);
    int (*finalize)(void *context);
} nccl_profiler_v1;

typedef void (*nccl_logger)(int level, unsigned long flags, const char *file, int line, const char *format, ...);

typedef struct {
    const char *name;
    int (*init)(void **context, int *activation_mask, const char *communicator_name, uint64_t communicator_hash,
                int node_count, int rank_count, int rank, nccl_logger logger);
    int (*start_event)(void *context, void **handle, const void *event);
    int (*stop_event)(void *handle);
    int (*record_event_state)(void *handle, int state, const void *arguments);
    int (*finalize)(void *context);
} nccl_profiler_v4;

typedef struct {
    const char *name;
    int (*init)(void **context, uint64_t communicator_hash, int *activation_mask, const char *communicator_name,
                int node_count, int rank_count, int rank, nccl_logger logger);
    int (*start_event)(void *context, void **handle, const void *event);
    int (*stop_event)(void *handle);
    int (*record_event_state)(void *handle, int state, const void *arguments);
    int (*finalize)(void *context);
} nccl_profiler_v5;

#endif
