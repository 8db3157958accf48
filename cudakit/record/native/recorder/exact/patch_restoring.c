#include "exact/patch_restoring.h"

#include "containers.h"
#include "exact/launch_order.h"
#include "exact/modules.h"
#include "exact/templates.h"
#include "model/kernels.h"
#include "recorder.h"
#include "vendor/driver_api.h"

/* The fields of a kernel that are known only when it launches. */
typedef struct {
    uint32_t module, name; /* id of the module; id of the name */
    uint32_t context;      /* id of the context of the last launch */
    uint32_t cluster[3];   /* size of a cluster in the last launch, in blocks */
} launched_kernel;

static __thread uint64_t entered_stream_key; /* stream_key() of the launch that this thread has entered */

static launched_kernel *kernels;
static size_t kernel_count, kernel_capacity;
static hash_table kernel_indices; /* index in ``kernels`` plus 1, by the function that the program launches */
static hash_table stream_ids;     /* id of the stream, by stream_key() of the last launches */

/* Return the kernel of a function. A new function gets a new kernel; return NULL if no memory is left. */
static launched_kernel *get_or_add_kernel(uint64_t function)
{
    const uint32_t index_plus_one = hash_table_get(&kernel_indices, function);
    if (index_plus_one)
        return kernels + index_plus_one - 1;
    launched_kernel *new_kernels =
        array_reserve(kernels, &kernel_capacity, kernel_count + 1, sizeof *kernels, 256);
    if (!new_kernels)
        return NULL;
    kernels = new_kernels;
    if (hash_table_put(&kernel_indices, function, (uint32_t)kernel_count + 1))
        return NULL;
    return kernels + kernel_count++;
}

void patch_restoring_add_kernel(const record *launch_record, const Sanitizer_LaunchData *launch)
{
    const uint64_t function = (uint64_t)(uintptr_t)this_launch.function;
    launched_kernel *kernel = function ? get_or_add_kernel(function) : NULL;
    if (function && hash_table_get(&stream_ids, entered_stream_key) != launch_record->stream)
        hash_table_put(&stream_ids, entered_stream_key, launch_record->stream);
    if (kernel)
        *kernel = (launched_kernel){patching_module_id(launch->module),
                                    launch_record->launch.name,
                                    launch_record->context,
                                    {launch->clusterDim_x, launch->clusterDim_y, launch->clusterDim_z}};
}

/* Return a key of the stream of a launch, which differs between the default streams of two contexts, and between
 * the per-thread default streams of two threads. */
static uint64_t stream_key(CUcontext context, CUstream stream)
{
    const uint64_t thread = stream == STREAM_PER_THREAD_HANDLE ? this_thread.id : 0;
    return (((uint64_t)(uintptr_t)context * 0x9E3779B97F4A7C15ull ^ (uint64_t)(uintptr_t)stream) +
            (thread << 40)) |
           1;
}

/* Return whether a template may apply to this thread's launch. ``stream`` is the id of the stream, or 0. The recorder lock
 * is held. */
static bool template_may_apply(const launched_kernel *kernel, const uint32_t grid[3], const uint32_t block[3],
                               uint32_t stream)
{
    const launch_arguments *arguments = kernels_arguments_of_launch();
    const launch_shape shape = {
        .module = kernel->module,
        .name = kernel->name,
        .context = kernel->context,
        .grid = {grid[0], grid[1], grid[2]},
        .block = {block[0], block[1], block[2]},
        .cluster = {kernel->cluster[0], kernel->cluster[1], kernel->cluster[2]},
    };
    const launch_hashes hashes = templates_hash_launch(&shape, arguments);
    const launch_signature signature = templates_find_signature(&hashes);
    const launch_memory memory = {.allocations = arguments->allocations,
                                  .allocation_count = arguments->allocation_count,
                                  .certainties = arguments->allocation_certainties,
                                  .pointers = arguments->pointers,
                                  .footprint = templates_footprint(&signature)};
    bool is_contested = false;
    for (size_t i = 0; i < arguments->allocation_count; i++)
        is_contested = is_contested || arguments->allocations[i]->is_contested;
    return !is_contested && templates_apply_to(&signature, launch_may_share_memory(&memory, stream));
}

bool patch_restoring_enter_launch(CUcontext context, CUstream stream, const uint32_t grid[3],
                                  const uint32_t block[3])
{
    entered_stream_key = stream_key(context, stream);
    if (!modules_include_unpatched())
        return true;
    pthread_mutex_lock(&recorder_lock);
    const uint32_t index_plus_one = hash_table_get(&kernel_indices, (uint64_t)(uintptr_t)this_launch.function);
    const launched_kernel *kernel = index_plus_one ? kernels + index_plus_one - 1 : NULL;
    const uint32_t module = kernel ? kernel->module : 0;
    const bool lacks_patch = module && !module_has_patch(module);
    const bool must_restore =
        lacks_patch && !template_may_apply(kernel, grid, block, hash_table_get(&stream_ids, entered_stream_key));
    pthread_mutex_unlock(&recorder_lock);
    if (!kernel || must_restore)
        launch_begin_delay();
    if (!kernel)
        modules_restore_all_patches();
    else if (must_restore)
        module_restore_patch(module);
    return !lacks_patch || must_restore;
}

void patch_restoring_forget_streams(void)
{
    hash_table_clear(&stream_ids);
}

void patch_restoring_clear(void)
{
    hash_table_clear(&stream_ids);
    hash_table_clear(&kernel_indices);
    kernel_count = 0;
}
