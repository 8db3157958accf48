#define _GNU_SOURCE
#include "profile/activity.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "containers.h"
#include "recorder.h"
#include "vendor/cupti_api.h"
#include "write/spool.h"

/* A buffer holds about 1,200 kernels. CUPTI returns a buffer when it is full, or at a flush if all work in it has
 * ended: a program that is killed while work is queued loses one buffer for each thread at most. CUPTI holds a few
 * buffers at a time; if it holds MAX_BUFFERS, it drops records. */
#define BUFFER_BYTES ((size_t)256 << 10)
#define MAX_BUFFERS 512
#define MAX_IDLE_BUFFERS 32
#define RECORDS_PER_LOCK 64 /* number of records that are written while the recorder lock is held once */
#define MAX_DEVICES 64
#define DEVICE_NAME_BYTES 256

/* CUdevice_attribute */
enum {
    MULTIPROCESSOR_COUNT = 16,
    MAX_THREADS_PER_MULTIPROCESSOR = 39,
    MAX_SHARED_MEMORY_PER_MULTIPROCESSOR = 81,
    MAX_REGISTERS_PER_MULTIPROCESSOR = 82,
    MAX_BLOCKS_PER_MULTIPROCESSOR = 106,
    RESERVED_SHARED_MEMORY_PER_BLOCK = 111,
};

/* ACTIVITY_KIND_SYNCHRONIZATION is not recorded: API_CALL records have the waits of the host, and CUPTI would also
 * record each wait of a stream for an event. cuDNN makes hundreds of such waits in a step of an LSTM. */
static const int RECORDED_KINDS[] = {
    ACTIVITY_CONCURRENT_KERNEL,
    ACTIVITY_MEMCPY,
    ACTIVITY_MEMCPY2,
    ACTIVITY_MEMSET,
};

/* Serializes the translation of records, so that the recorder lock is held only while records are copied. The lock
 * order is translation lock, then recorder lock. */
static pthread_mutex_t translation_lock = PTHREAD_MUTEX_INITIALIZER;

static pthread_mutex_t pool_lock = PTHREAD_MUTEX_INITIALIZER; /* protects the list of buffers */
static uint8_t *idle_buffers[MAX_IDLE_BUFFERS];
static size_t idle_buffer_count, buffer_count; /* buffer_count includes the buffers that CUPTI holds */

/* Text ids of kernel names, by the address of the name, which CUPTI does not free. The translation lock protects this
 * table. */
static hash_table kernel_name_ids;
static bool ignores_unfinished_work; /* whether work without times is not counted as lost; accessed atomically */
static uint64_t described_devices;   /* bit i: the name of device i is in the trace; accessed atomically */

/* --- buffers ------------------------------------------------------------------------------------ */

/* Give CUPTI a buffer of zeros. Without a buffer, CUPTI drops records and counts them. */
static void on_buffer_requested(uint8_t **buffer, size_t *size, size_t *max_records)
{
    uint8_t *buffer_memory = NULL;
    *max_records = 0; /* 0: no limit, except the size of the buffer */
    pthread_mutex_lock(&pool_lock);
    if (idle_buffer_count)
        buffer_memory = idle_buffers[--idle_buffer_count];
    else if (buffer_count < MAX_BUFFERS && (buffer_memory = calloc(1, BUFFER_BYTES)))
        buffer_count++;
    pthread_mutex_unlock(&pool_lock);
    *buffer = buffer_memory;
    *size = buffer_memory ? BUFFER_BYTES : 0;
}

static void return_buffer(uint8_t *buffer)
{
    memset(buffer, 0, BUFFER_BYTES);
    pthread_mutex_lock(&pool_lock);
    if (idle_buffer_count < MAX_IDLE_BUFFERS) {
        idle_buffers[idle_buffer_count++] = buffer;
        buffer = NULL;
    } else {
        buffer_count--;
    }
    pthread_mutex_unlock(&pool_lock);
    free(buffer);
}

/* --- translation of records --------------------------------------------------------------------- */

/* Return the text id of a kernel's name. The translation lock is held. */
static uint32_t kernel_name_id(const char *name)
{
    const uint64_t key = (uint64_t)(uintptr_t)name;
    if (!name)
        return 0;
    uint32_t id = hash_table_get(&kernel_name_ids, key);
    if (id)
        return id;
    pthread_mutex_lock(&recorder_lock);
    id = spool_text(name);
    pthread_mutex_unlock(&recorder_lock);
    if (id)
        hash_table_put(&kernel_name_ids, key, id);
    return id;
}

/* Set the common fields of a record. */
static void set_device_and_stream(record *rec, uint16_t kind, uint32_t device, uint32_t context, uint32_t stream)
{
    rec->kind = kind;
    rec->device = (int16_t)device;
    rec->context = context;
    rec->stream = stream;
}

static void translate_kernel(const CUpti_ActivityKernel *kernel, record *rec)
{
    set_device_and_stream(rec, KIND_KERNEL_RUN, kernel->deviceId, kernel->contextId, kernel->streamId);
    rec->kernel_run.name = kernel_name_id(kernel->name);
    rec->kernel_run.correlation = kernel->correlationId;
    rec->kernel_run.start_ns = (int64_t)kernel->start;
    rec->kernel_run.end_ns = (int64_t)kernel->end;
    rec->kernel_run.graph_node = kernel->graphNodeId;
    rec->kernel_run.grid[0] = (uint32_t)kernel->gridX;
    rec->kernel_run.grid[1] = (uint32_t)kernel->gridY;
    rec->kernel_run.grid[2] = (uint32_t)kernel->gridZ;
    rec->kernel_run.block[0] = (uint16_t)kernel->blockX;
    rec->kernel_run.block[1] = (uint16_t)kernel->blockY;
    rec->kernel_run.block[2] = (uint16_t)kernel->blockZ;
    rec->kernel_run.registers = kernel->registersPerThread;
    rec->kernel_run.shared_bytes = (uint32_t)(kernel->staticSharedMemory + kernel->dynamicSharedMemory);
}

static uint8_t direction_of(uint8_t copy_kind)
{
    switch (copy_kind) {
    case MEMCPY_HTOD:
    case MEMCPY_HTOA: return HOST_TO_DEVICE;
    case MEMCPY_DTOH:
    case MEMCPY_ATOH: return DEVICE_TO_HOST;
    case MEMCPY_HTOH: return HOST_TO_HOST;
    default: return DEVICE_TO_DEVICE;
    }
}

/* Return a memory kind of CUPTI if the trace format has this kind, or 0 for a kind of a newer release of CUPTI. */
static uint8_t recorded_memory_kind(uint8_t kind)
{
    return kind <= MEMORY_KIND_MANAGED_STATIC ? kind : 0;
}

static void translate_copy(const CUpti_ActivityMemcpy *copy, record *rec)
{
    set_device_and_stream(rec, KIND_COPY_RUN, copy->deviceId, copy->contextId, copy->streamId);
    rec->copy_run.start_ns = (int64_t)copy->start;
    rec->copy_run.end_ns = (int64_t)copy->end;
    rec->copy_run.size_bytes = copy->bytes;
    rec->copy_run.correlation = copy->correlationId;
    rec->copy_run.peer_device = -1;
    rec->copy_run.direction = direction_of(copy->copyKind);
    rec->copy_run.source_memory = recorded_memory_kind(copy->srcKind);
    rec->copy_run.destination_memory = recorded_memory_kind(copy->dstKind);
    rec->copy_run.graph_node = copy->graphNodeId;
}

static void translate_peer_copy(const CUpti_ActivityMemcpyPtoP *copy, record *rec)
{
    const uint32_t peer_device = copy->srcDeviceId == copy->deviceId ? copy->dstDeviceId : copy->srcDeviceId;
    set_device_and_stream(rec, KIND_COPY_RUN, copy->deviceId, copy->contextId, copy->streamId);
    rec->copy_run.start_ns = (int64_t)copy->start;
    rec->copy_run.end_ns = (int64_t)copy->end;
    rec->copy_run.size_bytes = copy->bytes;
    rec->copy_run.correlation = copy->correlationId;
    rec->copy_run.peer_device = (int16_t)peer_device;
    rec->copy_run.direction = DEVICE_TO_DEVICE;
    rec->copy_run.source_memory = recorded_memory_kind(copy->srcKind);
    rec->copy_run.destination_memory = recorded_memory_kind(copy->dstKind);
    rec->copy_run.graph_node = copy->graphNodeId;
}

static void translate_fill(const CUpti_ActivityMemset *fill, record *rec)
{
    set_device_and_stream(rec, KIND_FILL_RUN, fill->deviceId, fill->contextId, fill->streamId);
    rec->fill_run.start_ns = (int64_t)fill->start;
    rec->fill_run.end_ns = (int64_t)fill->end;
    rec->fill_run.size_bytes = fill->bytes;
    rec->fill_run.correlation = fill->correlationId;
    rec->fill_run.graph_node = fill->graphNodeId;
}

/* Return the number of bytes that are read of a record, or 0 for a kind that is not recorded. */
static size_t bytes_of_kind(int kind)
{
    switch (kind) {
    case ACTIVITY_CONCURRENT_KERNEL: return sizeof(CUpti_ActivityKernel);
    case ACTIVITY_MEMCPY: return sizeof(CUpti_ActivityMemcpy);
    case ACTIVITY_MEMCPY2: return sizeof(CUpti_ActivityMemcpyPtoP);
    case ACTIVITY_MEMSET: return sizeof(CUpti_ActivityMemset);
    default: return 0;
    }
}

/* Translate a record of CUPTI; ``rec`` already has the common fields. Return false if the start or end time is
 * missing: CUPTI returns such records for work that did not end. The translation lock is held. */
static bool translate_record(const CUpti_Activity *activity, record *rec)
{
    uint64_t start_ns, end_ns;
    switch (activity->kind) {
    case ACTIVITY_CONCURRENT_KERNEL: translate_kernel((const void *)activity, rec); break;
    case ACTIVITY_MEMCPY: translate_copy((const void *)activity, rec); break;
    case ACTIVITY_MEMCPY2: translate_peer_copy((const void *)activity, rec); break;
    default: translate_fill((const void *)activity, rec); break;
    }
    if (activity->kind == ACTIVITY_CONCURRENT_KERNEL) {
        start_ns = (uint64_t)rec->kernel_run.start_ns;
        end_ns = (uint64_t)rec->kernel_run.end_ns;
    } else { /* records of the other kinds begin with the start and end time */
        start_ns = (uint64_t)rec->copy_run.start_ns;
        end_ns = (uint64_t)rec->copy_run.end_ns;
    }
    return start_ns && end_ns >= start_ns;
}

/* --- devices ------------------------------------------------------------------------------------ */

typedef int (*attribute_getter)(int *, int, CUdevice);

/* Return an attribute of a device, or 0 if the driver does not know it. */
static uint32_t device_attribute(attribute_getter get_attribute, int attribute, CUdevice device)
{
    int attribute_value = 0;
    return !get_attribute(&attribute_value, attribute, device) && attribute_value > 0 ? (uint32_t)attribute_value
                                                                                      : 0;
}

/* Store the number of multiprocessors of a device, and the threads, blocks, registers and shared memory of each.
 * Calls CUDA. */
static void read_multiprocessor_limits(attribute_getter get_attribute, CUdevice device, record *rec)
{
    rec->device_info.multiprocessors = device_attribute(get_attribute, MULTIPROCESSOR_COUNT, device);
    rec->device_info.threads_per_multiprocessor =
        device_attribute(get_attribute, MAX_THREADS_PER_MULTIPROCESSOR, device);
    rec->device_info.blocks_per_multiprocessor =
        device_attribute(get_attribute, MAX_BLOCKS_PER_MULTIPROCESSOR, device);
    rec->device_info.registers_per_multiprocessor =
        device_attribute(get_attribute, MAX_REGISTERS_PER_MULTIPROCESSOR, device);
    rec->device_info.shared_bytes_per_multiprocessor =
        device_attribute(get_attribute, MAX_SHARED_MEMORY_PER_MULTIPROCESSOR, device);
    rec->device_info.reserved_shared_bytes_per_block =
        device_attribute(get_attribute, RESERVED_SHARED_MEMORY_PER_BLOCK, device);
}

/* Write the name and the properties of a device. Calls CUDA: the recorder lock is not held. */
static void describe_device(uint32_t device_number)
{
    const uint64_t device_bit = 1ull << device_number;
    if (__atomic_fetch_or(&described_devices, device_bit, __ATOMIC_ACQ_REL) & device_bit)
        return;
    void *driver_library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    int (*get_name)(char *, int, CUdevice) = NULL;
    attribute_getter get_attribute = NULL;
    int (*get_memory)(size_t *, CUdevice) = NULL;
    if (driver_library) {
        *(void **)&get_name = dlsym(driver_library, "cuDeviceGetName");
        *(void **)&get_attribute = dlsym(driver_library, "cuDeviceGetAttribute");
        *(void **)&get_memory = dlsym(driver_library, "cuDeviceTotalMem_v2");
    }
    char name[DEVICE_NAME_BYTES] = "";
    size_t memory_bytes = 0;
    record device_record = {.kind = 0};
    this_thread.in_recorder_call = true;
    /* The handle of a device is its number (cuDeviceGet). A failed query leaves the value unchanged. */
    if (get_name && get_attribute && get_memory) {
        get_name(name, sizeof name - 1, (CUdevice)device_number);
        read_multiprocessor_limits(get_attribute, (CUdevice)device_number, &device_record);
        get_memory(&memory_bytes, (CUdevice)device_number);
    }
    this_thread.in_recorder_call = false;
    pthread_mutex_lock(&recorder_lock);
    record rec = record_begin(KIND_DEVICE_INFO, 0, 0, 0);
    rec.device = (int16_t)device_number;
    rec.device_info = device_record.device_info;
    rec.device_info.name = spool_text(name);
    rec.device_info.memory_bytes = memory_bytes;
    record_append(&rec);
    pthread_mutex_unlock(&recorder_lock);
}

/* --- completed buffers -------------------------------------------------------------------------- */

typedef struct {
    uint8_t *buffer;
    size_t valid_bytes;
    CUpti_Activity *current_record; /* the latest record; NULL before the first one */
    uint64_t timeless_record_count,
        cut_record_count; /* numbers of records without times, and of records that exceed the buffer */
} buffer_reader;

/* Advance to the next record of a kind that is recorded. Return false at the end of the buffer. */
static bool advance_to_next_record(buffer_reader *position)
{
    while (!cupti.next_record(position->buffer, position->valid_bytes, &position->current_record)) {
        const size_t offset = (size_t)((uint8_t *)position->current_record - position->buffer);
        if (offset > position->valid_bytes || position->valid_bytes - offset < sizeof(CUpti_Activity)) {
            position->cut_record_count++;
            return false;
        }
        const size_t record_bytes = bytes_of_kind(position->current_record->kind);
        if (!record_bytes)
            continue;
        if (position->valid_bytes - offset < record_bytes) {
            position->cut_record_count++;
            return false;
        }
        return true;
    }
    return false;
}

/* Append translated records to the trace. Store the device of each context, for records of API calls, and set the
 * bits of these devices in ``device_bits``. */
static void append_records(record *records, size_t count, uint64_t *device_bits)
{
    pthread_mutex_lock(&recorder_lock);
    const record common_fields = record_begin(0, 0, 0, 0);
    for (record *rec = records; rec < records + count; rec++) {
        rec->seq = common_fields.seq;
        rec->time_ns = common_fields.time_ns;
        set_context_device(rec->context, rec->device);
        if (rec->device >= 0 && rec->device < MAX_DEVICES)
            *device_bits |= 1ull << rec->device;
    }
    if (count)
        spool_records(records, count);
    pthread_mutex_unlock(&recorder_lock);
}

/* Write up to RECORDS_PER_LOCK records to the trace. Return false at the end of the buffer. */
static bool write_records(buffer_reader *position, uint64_t *device_bits)
{
    static record records[RECORDS_PER_LOCK]; /* protected by the translation lock */
    size_t record_count = 0;
    bool has_more_records = true;
    pthread_mutex_lock(&translation_lock);
    while (record_count < RECORDS_PER_LOCK && (has_more_records = advance_to_next_record(position))) {
        memset(records + record_count, 0, sizeof *records);
        if (translate_record(position->current_record, records + record_count))
            record_count++;
        else if (!__atomic_load_n(&ignores_unfinished_work, __ATOMIC_ACQUIRE))
            position->timeless_record_count++;
    }
    append_records(records, record_count, device_bits);
    pthread_mutex_unlock(&translation_lock);
    return has_more_records;
}

/* Record how many activities are missing. */
static void record_missing_activities(const buffer_reader *position, size_t dropped_count)
{
    if (!dropped_count && !position->timeless_record_count && !position->cut_record_count)
        return;
    pthread_mutex_lock(&recorder_lock);
    if (dropped_count)
        record_gaps("GPU activities that CUPTI dropped, because its buffers were full", dropped_count);
    if (position->timeless_record_count)
        record_gaps("GPU activities without times, because they had not ended", position->timeless_record_count);
    if (position->cut_record_count)
        record_gaps("buffer of CUPTI with a damaged record: its later activities are not recorded",
                    position->cut_record_count);
    pthread_mutex_unlock(&recorder_lock);
}

/* Write the records of a buffer to the trace. CUPTI calls this function on any thread. */
static void on_buffer_completed(CUcontext context, uint32_t stream, uint8_t *buffer, size_t size,
                                size_t valid_bytes)
{
    (void)size;
    if (!buffer)
        return;
    buffer_reader position = {buffer, valid_bytes < BUFFER_BYTES ? valid_bytes : BUFFER_BYTES, NULL, 0, 0};
    uint64_t device_bits = 0;
    spool_allocate_ahead();
    while (position.valid_bytes && write_records(&position, &device_bits))
        ;
    size_t dropped_count = 0;
    if (cupti.dropped_records(context, stream, &dropped_count))
        dropped_count = 0;
    record_missing_activities(&position, dropped_count);
    return_buffer(buffer);
    for (uint32_t device_number = 0; device_number < MAX_DEVICES; device_number++)
        if (device_bits >> device_number & 1)
            describe_device(device_number);
}

/* Return the time of the trace's clock. */
static uint64_t read_clock(void)
{
    return (uint64_t)monotonic_ns();
}

int activity_prepare(void)
{
    /* Declare to CUPTI that the buffers contain zeros. Otherwise CUPTI clears the buffers on the threads of the
     * program. A failure of this call only costs time. */
    uint8_t buffers_are_zero = 1;
    size_t value_bytes = sizeof buffers_are_zero;
    cupti.set_attribute(ATTRIBUTE_ZEROED_OUT_ACTIVITY_BUFFER, &value_bytes, &buffers_are_zero);
    const int result = cupti.register_timestamp(read_clock);
    return result ? result : cupti.register_buffers(on_buffer_requested, on_buffer_completed);
}

int activity_enable(void)
{
    int result = 0;
    for (size_t i = 0; i < sizeof RECORDED_KINDS / sizeof *RECORDED_KINDS && !result; i++)
        result = cupti.activity_enable(RECORDED_KINDS[i]);
    if (result)
        activity_disable();
    return result;
}

void activity_disable(void)
{
    for (size_t i = 0; i < sizeof RECORDED_KINDS / sizeof *RECORDED_KINDS; i++)
        cupti.activity_disable(RECORDED_KINDS[i]);
}

void activity_flush(void)
{
    cupti.flush_all(0);
}

void activity_flush_unfinished(bool count_unfinished)
{
    __atomic_store_n(&ignores_unfinished_work, !count_unfinished, __ATOMIC_RELEASE);
    cupti.flush_all(ACTIVITY_FLUSH_FORCED);
    __atomic_store_n(&ignores_unfinished_work, false, __ATOMIC_RELEASE);
}

void activity_forget_names(void)
{
    pthread_mutex_lock(&translation_lock);
    hash_table_clear(&kernel_name_ids);
    pthread_mutex_unlock(&translation_lock);
}

void activity_forked(void)
{
    pool_lock = translation_lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    idle_buffer_count = buffer_count = 0;
    described_devices = 0;
    activity_forget_names();
}
