/* Records the allocations and frees of memory pools above the driver, such as CuPy's. Hooks in Python report them. */
#include "hooks/hooks.h"

#include "recorder.h"
#include "write/call_sites.h"
#include "write/spool.h"

static void record_block(uint16_t kind, const pool_block *block)
{
    call_site stack;
    call_site_of_caller(&stack, block->skipped_frame_count);
    pthread_mutex_lock(&recorder_lock);
    record rec = record_begin(kind, 0, 0, call_site_id(&stack));
    rec.device = (int16_t)block->device;
    rec.memory.address = block->address;
    rec.memory.size_bytes = block->size_bytes;
    rec.memory.allocation_kind = ALLOCATION_SYNC;
    rec.memory.layer = block->allocates_from_driver ? LAYER_DRIVER : LAYER_POOL;
    rec.memory.pool = spool_text(block->pool_name);
    if (kind == KIND_ALLOC)
        rec.memory.requested_bytes = block->requested_bytes;
    record_append_and_unlock(&rec);
}

void pools_record_alloc(const pool_block *block)
{
    record_block(KIND_ALLOC, block);
}

void pools_record_free(const pool_block *block)
{
    record_block(KIND_FREE, block);
}

void pools_record_out_of_memory(const pool_block *block, uint64_t free_bytes)
{
    call_site stack;
    call_site_of_caller(&stack, block->skipped_frame_count);
    pthread_mutex_lock(&recorder_lock);
    record rec = record_begin(KIND_OUT_OF_MEMORY, 0, 0, call_site_id(&stack));
    rec.device = (int16_t)block->device;
    rec.out_of_memory.size_bytes = block->size_bytes;
    rec.out_of_memory.free_bytes = free_bytes;
    rec.out_of_memory.pool = spool_text(block->pool_name);
    record_append_and_unlock(&rec);
}

void pools_record_mark(const char *name, int skipped_frames)
{
    call_site stack;
    call_site_of_caller(&stack, skipped_frames);
    pthread_mutex_lock(&recorder_lock);
    record rec = record_begin(KIND_MARK, 0, 0, call_site_id(&stack));
    rec.mark.name = spool_text(name);
    rec.mark.domain = spool_text("cudakit");
    record_append_and_unlock(&rec);
}
