/* The Python module of the recorder. It uses the stable ABI, so that one build works with every version of CPython. */
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>
#include <stddef.h>

#include "exact/exact.h"
#include "exact/modules.h"
#include "exact/templates.h"
#include "hooks/hooks.h"
#include "model/ranges.h"
#include "profile/window.h"
#include "recorder.h"
#include "vendor/cupti_api.h"
#include "vendor/sanitizer_api.h"
#include "write/call_sites.h"
#include "write/record.h"
#include "write/spool.h"

#define ERROR_BYTES 1024

static bool is_started; /* start() succeeded, and stop() was not called since; the GIL protects it */

static PyObject *raise_error(const char *error)
{
    PyErr_SetString(PyExc_RuntimeError, error);
    return NULL;
}

PyDoc_STRVAR(start_doc, "start(spool, library, walker=0, patches=(), memory_only=False, templates=False)\n--\n\n"
                        "Record the CUDA and NVTX calls of this process into the directory spool, until\n"
                        "stop().\n\n"
                        "library is the path of libsanitizer-public.so; if it is empty, CUDA calls are not\n"
                        "recorded. walker is the value of _frames.walker, or 0: then records have no call\n"
                        "stacks. patches are pairs of a compute capability, such as 90, and the bytes of\n"
                        "the device patch for it: patched kernels report their accesses. With templates,\n"
                        "launches whose accesses are known from earlier ones are not recorded. memory_only\n"
                        "records no CUDA calls but allocations and frees. Call it before CUDA and NVTX\n"
                        "are used. Returns None, or the path of another library that\n"
                        "NVTX_INJECTION64_PATH names: then NVTX is not recorded. Raises RuntimeError.");

/* Add the patches of a sequence of (capability, image) pairs. Return 0, or -1 with an exception set. */
static int add_patches(PyObject *patches)
{
    Py_ssize_t patch_count = patches ? PySequence_Size(patches) : 0;
    for (Py_ssize_t i = 0; i < patch_count; i++) {
        PyObject *pair = PySequence_GetItem(patches, i);
        int capability, has_failed = 1;
        const char *image;
        Py_ssize_t image_bytes;
        if (pair && PyArg_ParseTuple(pair, "iy#", &capability, &image, &image_bytes))
            has_failed = patching_add_image(capability, image, (size_t)image_bytes);
        Py_XDECREF(pair);
        if (has_failed && !PyErr_Occurred())
            PyErr_NoMemory();
        if (has_failed)
            return -1;
    }
    return patch_count < 0 ? -1 : 0;
}

static PyObject *start(PyObject *self, PyObject *args, PyObject *keyword_arguments)
{
    static char *parameter_names[] = {"spool", "library", "walker", "patches", "memory_only", "templates", NULL};
    const char *spool, *library;
    unsigned long long walker = 0;
    PyObject *patches = NULL;
    int memory_only = 0, templates = 0;
    char error[ERROR_BYTES];
    (void)self;
    if (!PyArg_ParseTupleAndKeywords(args, keyword_arguments, "ss|KOpp", parameter_names, &spool, &library,
                                     &walker, &patches, &memory_only, &templates) ||
        add_patches(patches))
        return NULL;
    if (is_started)
        return raise_error("this process is being recorded already");
    if (templates)
        templates_enable();
    spool_open(spool);
    call_sites_set_walker((const struct ck_walker *)(uintptr_t)walker);
    if (!*library)
        tracing_begin();
    else if (!subscription_begin(library, memory_only, error, sizeof error))
        return raise_error(error);
    is_started = true;
    return Py_BuildValue("z", nvtx_inject());
}

PyDoc_STRVAR(stop_doc, "stop()\n--\n\nStop recording; does nothing if not recording.");

static PyObject *stop(PyObject *self, PyObject *unused)
{
    (void)self, (void)unused;
    is_started = false;
    Py_BEGIN_ALLOW_THREADS
    profile_cancel();
    subscription_end();
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

PyDoc_STRVAR(read_doc, "read()\n--\n\nWait for all launches so far, and write their accesses to the trace.");

static PyObject *read_all(PyObject *self, PyObject *unused)
{
    (void)self, (void)unused;
    Py_BEGIN_ALLOW_THREADS
    exact_read_all();
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

PyDoc_STRVAR(finish_doc, "finish()\n--\n\n"
                         "Write the accesses of all kernels so far, while CUDA still works, and end the\n"
                         "profile. Accesses of later kernels are not recorded. To be called at the end of\n"
                         "the program.");

static PyObject *finish(PyObject *self, PyObject *unused)
{
    (void)self, (void)unused;
    Py_BEGIN_ALLOW_THREADS
    exact_finish();
    profile_end();
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

/* Read the arguments of profile(); on failure return false with an exception set. */
static bool parse_profile_arguments(PyObject *args, PyObject *keywords, profile_options *options, int *begins_now)
{
    static char *parameter_names[] = {"library", "delay", "duration", "range", "paused", "now", NULL};
    int is_paused = 0;
    options->range_name = "";
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "s|ddspp", parameter_names, &options->library_path,
                                     &options->delay_s, &options->duration_s, &options->range_name, &is_paused,
                                     begins_now))
        return false;
    options->is_paused = is_paused;
    return true;
}

PyDoc_STRVAR(profile_doc, "profile(library, delay=0, duration=0, range='', paused=False, now=False)\n--\n\n"
                          "Record the kernels, copies and fills of this process with\n"
                          "CUPTI, and the calls that start them. library is the path of libcupti.so.\n\n"
                          "The profile begins at the first use of CUDA, or with now immediately, and ends\n"
                          "with finish(). delay and duration are in seconds; duration 0 has no limit.\n"
                          "With range, only the NVTX ranges of this name are recorded; with paused,\n"
                          "nothing before a call of cudaProfilerStart. Call it after start(). Returns\n"
                          "None, or the path of another library that CUDA_INJECTION64_PATH names: then\n"
                          "the process is not profiled. Raises RuntimeError.");

static PyObject *profile(PyObject *self, PyObject *args, PyObject *keywords)
{
    profile_options options = {0};
    int begins_now = 0;
    bool has_begun = true;
    char error[ERROR_BYTES];
    (void)self;
    if (!parse_profile_arguments(args, keywords, &options, &begins_now))
        return NULL;
    if (!begins_now)
        return Py_BuildValue("z", profile_at_first_use(&options));
    Py_BEGIN_ALLOW_THREADS
    has_begun = profile_begin(&options, error, sizeof error);
    Py_END_ALLOW_THREADS
    if (!has_begun)
        return raise_error(error);
    Py_RETURN_NONE;
}

/* Ignore a callback: the check of CUPTI subscribes and unsubscribes only. */
static void ignore_callback(void *unused, int domain, uint32_t cbid, const void *data)
{
    (void)unused, (void)domain, (void)cbid, (void)data;
}

PyDoc_STRVAR(check_profile_doc, "check_profile(library)\n--\n\n"
                                "Check that this process can be profiled: subscribe to CUPTI, and unsubscribe at\n"
                                "once. Return the version of CUPTI. Raises RuntimeError.");

static PyObject *check_profile(PyObject *self, PyObject *args)
{
    const char *library;
    char error[ERROR_BYTES];
    uint32_t version = 0;
    (void)self;
    if (!PyArg_ParseTuple(args, "s", &library))
        return NULL;
    CUpti_SubscriberHandle subscriber = library_subscribe(library, ignore_callback, error, sizeof error);
    if (!subscriber)
        return raise_error(error);
    cupti.get_version(&version);
    cupti.unsubscribe(subscriber);
    return PyLong_FromUnsignedLong(version);
}

PyDoc_STRVAR(check_doc, "check(library)\n--\n\n"
                        "Check that this process can be recorded: subscribe, and unsubscribe at once.\n\n"
                        "Raises RuntimeError.");

static PyObject *check(PyObject *self, PyObject *args)
{
    const char *library;
    char error[ERROR_BYTES];
    (void)self;
    if (!PyArg_ParseTuple(args, "s", &library))
        return NULL;
    if (!subscription_begin(library, false, error, sizeof error))
        return raise_error(error);
    subscription_end();
    Py_RETURN_NONE;
}

PyDoc_STRVAR(counts_doc,
             "counts()\n--\n\nReturn the numbers of written and lost records, and the errno of the last loss.");

static PyObject *counts(PyObject *self, PyObject *unused)
{
    int error_number;
    (void)self, (void)unused;
    unsigned long long lost_count = spool_lost(&error_number), written_count = spool_written();
    return Py_BuildValue("{s:K,s:K,s:i}", "written", written_count, "lost", lost_count, "errno", error_number);
}

/* --- pools ------------------------------------------------------------------------------------- */

/* Read the arguments of alloc() and free(); on failure return false with an exception set. */
static bool parse_block_arguments(PyObject *args, PyObject *keywords, pool_block *block)
{
    static char *parameter_names[] = {"pool", "device", "address", "size", "requested", "driver", "skip", NULL};
    unsigned long long address, size, requested = 0;
    int driver = 0;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "siKK|Kpi", parameter_names, &block->pool_name,
                                     &block->device, &address, &size, &requested, &driver,
                                     &block->skipped_frame_count))
        return false;
    block->address = address;
    block->size_bytes = size;
    block->requested_bytes = requested;
    block->allocates_from_driver = driver;
    return true;
}

PyDoc_STRVAR(alloc_doc, "alloc(pool, device, address, size, requested=0, driver=False, skip=0)\n--\n\n"
                        "Record a block that a pool above the driver allocated: size bytes, of which the\n"
                        "program requested some (0: all). With driver, record memory that the pool allocated\n"
                        "from the driver. skip is the number of innermost frames that belong to cudakit.");

static PyObject *pool_alloc(PyObject *self, PyObject *args, PyObject *keywords)
{
    pool_block block = {0};
    (void)self;
    if (!parse_block_arguments(args, keywords, &block))
        return NULL;
    pools_record_alloc(&block);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(free_doc, "free(pool, device, address, size, requested=0, driver=False, skip=0)\n--\n\n"
                       "Record that a pool freed a block: with the arguments of alloc().");

static PyObject *pool_free(PyObject *self, PyObject *args, PyObject *keywords)
{
    pool_block block = {0};
    (void)self;
    if (!parse_block_arguments(args, keywords, &block))
        return NULL;
    pools_record_free(&block);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(out_of_memory_doc,
             "out_of_memory(pool, device, size, free, skip=0)\n--\n\n"
             "Record that a pool could not allocate size bytes, while free bytes of the\n"
             "device were free. skip is the number of innermost frames that belong to cudakit.");

static PyObject *out_of_memory(PyObject *self, PyObject *args)
{
    pool_block block = {0};
    unsigned long long size, free_bytes;
    (void)self;
    if (!PyArg_ParseTuple(args, "siKK|i", &block.pool_name, &block.device, &size, &free_bytes,
                          &block.skipped_frame_count))
        return NULL;
    block.size_bytes = size;
    pools_record_out_of_memory(&block, free_bytes);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(mark_doc, "mark(name, skip=0)\n--\n\n"
                       "Record a named instant of the domain cudakit. skip is the number of innermost\n"
                       "frames that belong to cudakit.");

static PyObject *mark(PyObject *self, PyObject *args)
{
    const char *name;
    int skipped_frames = 0;
    (void)self;
    if (!PyArg_ParseTuple(args, "s|i", &name, &skipped_frames))
        return NULL;
    pools_record_mark(name, skipped_frames);
    Py_RETURN_NONE;
}

/* --- backward passes -------------------------------------------------------------------------- */

/* Return whether the calling thread already runs a part of a backward pass. ``current_task`` is torch's function that
 * returns the number of the pass that the thread works for, or -1. */
static bool is_in_backward(PyObject *current_task)
{
    PyObject *pass_number = current_task == Py_None ? NULL : PyObject_CallNoArgs(current_task);
    bool is_running = pass_number && PyLong_AsLong(pass_number) >= 0;
    Py_XDECREF(pass_number);
    PyErr_Clear();
    return is_running;
}

/* Call torch's function that runs a backward pass, and register the pass meanwhile. A nested pass is not registered:
 * its work counts as work of the outer pass. */
static PyObject *run_backward(PyObject *self, PyObject *args, PyObject *keyword_arguments)
{
    backward_pass *pass = is_in_backward(PyTuple_GetItem(self, 1)) ? NULL : backward_begin();
    PyObject *result = PyObject_Call(PyTuple_GetItem(self, 0), args, keyword_arguments);
    backward_end(pass);
    return result;
}

static PyMethodDef RUN_BACKWARD = {"_engine_run_backward", (PyCFunction)(void (*)(void))run_backward,
                                   METH_VARARGS | METH_KEYWORDS,
                                   "Run a backward pass by torch's function, with its call stack registered."};

PyDoc_STRVAR(with_call_site_doc,
             "with_call_site(run_backward, current_task=None, ranges=False)\n--\n\n"
             "Return a function that calls run_backward, torch's function that runs a backward\n"
             "pass. Until it returns, work of autograd's threads gets the call stack of its\n"
             "caller. current_task is a function that returns the number of the backward\n"
             "pass that the calling thread works for, or -1.\n"
             "With ranges, each pass is also recorded as a range of the domain cudakit.");

static PyObject *with_call_site(PyObject *self, PyObject *args)
{
    PyObject *run_backward_function, *current_task = Py_None;
    int record_ranges = 0;
    (void)self;
    if (!PyArg_ParseTuple(args, "O|Op", &run_backward_function, &current_task, &record_ranges))
        return NULL;
    if (record_ranges)
        backward_record_ranges();
    PyObject *bound_arguments = PyTuple_Pack(2, run_backward_function, current_task);
    PyObject *wrapped_function = bound_arguments ? PyCFunction_NewEx(&RUN_BACKWARD, bound_arguments, NULL) : NULL;
    Py_XDECREF(bound_arguments);
    return wrapped_function;
}

/* --- struct offsets --------------------------------------------------------------------------- */

#define SANITIZER_FIELDS(X) \
    X(Sanitizer_CallbackData, callbackSite) \
    X(Sanitizer_CallbackData, functionParams) \
    X(Sanitizer_CallbackData, functionReturnValue) \
    X(Sanitizer_ResourceContextData, context) \
    X(Sanitizer_ResourceContextData, device) \
    X(Sanitizer_ResourceStreamData, context) \
    X(Sanitizer_ResourceStreamData, stream) \
    X(Sanitizer_ResourceStreamData, hStream) \
    X(Sanitizer_ResourceModuleData, context) \
    X(Sanitizer_ResourceModuleData, module) \
    X(Sanitizer_ResourceModuleData, cubinSize) \
    X(Sanitizer_ResourceModuleData, pCubin) \
    X(Sanitizer_ResourceMemoryData, address) \
    X(Sanitizer_ResourceMemoryData, size) \
    X(Sanitizer_ResourceMemoryData, context) \
    X(Sanitizer_ResourceMemoryData, device) \
    X(Sanitizer_ResourceMemoryData, hStream) \
    X(Sanitizer_ResourceMemoryData, flags) \
    X(Sanitizer_SynchronizeData, context) \
    X(Sanitizer_SynchronizeData, hStream) \
    X(Sanitizer_LaunchData, context) \
    X(Sanitizer_LaunchData, hStream) \
    X(Sanitizer_LaunchData, function) \
    X(Sanitizer_LaunchData, functionName) \
    X(Sanitizer_LaunchData, gridDim_x) \
    X(Sanitizer_LaunchData, blockDim_x) \
    X(Sanitizer_LaunchData, module) \
    X(Sanitizer_LaunchData, gridId) \
    X(Sanitizer_LaunchData, hLaunch) \
    X(Sanitizer_LaunchData, device) \
    X(Sanitizer_LaunchData, splitLaunchPart) \
    X(Sanitizer_MemcpyData, dstContext) \
    X(Sanitizer_MemcpyData, hDstStream) \
    X(Sanitizer_MemcpyData, srcAddress) \
    X(Sanitizer_MemcpyData, dstAddress) \
    X(Sanitizer_MemcpyData, size) \
    X(Sanitizer_MemcpyData, width) \
    X(Sanitizer_MemcpyData, height) \
    X(Sanitizer_MemcpyData, depth) \
    X(Sanitizer_MemcpyData, srcPitch) \
    X(Sanitizer_MemcpyData, dstPitch) \
    X(Sanitizer_MemcpyData, isAsync) \
    X(Sanitizer_MemcpyData, direction) \
    X(Sanitizer_MemcpyData, apiContext) \
    X(Sanitizer_MemcpyData, hApiStream) \
    X(Sanitizer_MemsetData, context) \
    X(Sanitizer_MemsetData, hStream) \
    X(Sanitizer_MemsetData, address) \
    X(Sanitizer_MemsetData, width) \
    X(Sanitizer_MemsetData, height) \
    X(Sanitizer_MemsetData, pitch) \
    X(Sanitizer_MemsetData, elementSize) \
    X(Sanitizer_MemsetData, isAsync) \
    X(Sanitizer_BatchMemopData, context) \
    X(Sanitizer_BatchMemopData, hStream) \
    X(Sanitizer_BatchMemopData, address) \
    X(Sanitizer_GraphExecData, graphExec) \
    X(Sanitizer_GraphExecData, isDeviceLaunch) \
    X(Sanitizer_GraphExecData, containsDeviceGraphLaunches) \
    X(Sanitizer_GraphNodeLaunchData, node) \
    X(Sanitizer_GraphNodeLaunchData, nodeType) \
    X(Sanitizer_GraphNodeLaunchData, launchData) \
    X(Sanitizer_GraphNodeLaunchData, isGraphUpload) \
    X(Sanitizer_GraphLaunchData, context) \
    X(Sanitizer_GraphLaunchData, hStream) \
    X(Sanitizer_GraphLaunchData, graphExec) \
    X(Sanitizer_GraphLaunchData, isGraphUpload) \
    X(Sanitizer_EventData, event) \
    X(Sanitizer_EventData, context) \
    X(Sanitizer_EventData, hStream)

/* The fields of each kind of record, at least one line per kind. */
/* clang-format off */
#define RECORD_FIELDS(X) \
    X(record, seq) X(record, time_ns) X(record, thread) X(record, program_call) X(record, stream) X(record, context) X(record, site) \
    X(record, device) X(record, kind) \
    X(record, memory.address) X(record, memory.size_bytes) X(record, memory.allocation_kind) X(record, memory.layer) \
    X(record, memory.pool) X(record, memory.requested_bytes) \
    X(record, launch.name) X(record, launch.grid) X(record, launch.block) X(record, launch.pending) \
    X(record, launch.template_id) X(record, launch.is_relative) X(record, launch.is_checked) X(record, launch.is_unordered) X(record, template_pointers.pointers) \
    X(record, access.lo) X(record, access.hi) X(record, access.mode) X(record, access.precision) \
    X(record, access.stride_bytes) X(record, access.count) X(record, access.node) \
    X(record, copy.destination) X(record, copy.source) X(record, copy.size_bytes) X(record, copy.rows) \
    X(record, copy.destination_pitch_bytes) X(record, copy.source_pitch_bytes) X(record, copy.direction) \
    X(record, copy.host) X(record, copy.asynchronous) \
    X(record, fill.address) X(record, fill.size_bytes) X(record, fill.rows) X(record, fill.pitch_bytes) \
    X(record, fill.asynchronous) \
    X(record, stream_create.flag) X(record, stream_create.priority) \
    X(record, event.event) \
    X(record, node.graph) X(record, node.node) X(record, node.node_type) X(record, node.name) \
    X(record, edge.graph) X(record, edge.before) X(record, edge.after) \
    X(record, graph_launch.graph) X(record, graph_launch.executable) X(record, graph_launch.pending) \
    X(record, graph_launch.template_id) X(record, graph_launch.is_checked) X(record, graph_launch.is_unordered) X(record, access_template.template_id) X(record, access_template.check) \
    X(record, accessed.node) X(record, accessed.exact) \
    X(record, arenas.size_bytes) X(record, launch_delay.pending) \
    X(record, graph_destroy.graph) X(record, graph_destroy.executable) \
    X(record, out_of_memory.size_bytes) X(record, out_of_memory.free_bytes) X(record, out_of_memory.pool) \
    X(record, memop.address) X(record, memop.flag) \
    X(record, host_call.phase) X(record, host_call.event) \
    X(record, range_push.name) X(record, range_push.domain) X(record, range_push.number) \
    X(record, range_push.is_copy) X(record, range_pop.domain) X(record, range_pop.number) \
    X(record, range_pop.is_copy) \
    X(record, mark.name) X(record, mark.domain) \
    X(record, api_call.function) X(record, api_call.correlation) X(record, api_call.start_ns) \
    X(record, api_call.end_ns) X(record, api_call.size_bytes) \
    X(record, kernel_run.name) X(record, kernel_run.correlation) X(record, kernel_run.start_ns) \
    X(record, kernel_run.end_ns) X(record, kernel_run.graph_node) X(record, kernel_run.grid) \
    X(record, kernel_run.block) X(record, kernel_run.registers) X(record, kernel_run.shared_bytes) \
    X(record, copy_run.start_ns) X(record, copy_run.end_ns) X(record, copy_run.size_bytes) \
    X(record, copy_run.correlation) X(record, copy_run.peer_device) X(record, copy_run.direction) \
    X(record, copy_run.source_memory) X(record, copy_run.destination_memory) X(record, copy_run.graph_node) \
    X(record, fill_run.start_ns) X(record, fill_run.end_ns) X(record, fill_run.size_bytes) \
    X(record, fill_run.correlation) X(record, fill_run.graph_node) \
 \
 \
 X(record, graph_node_site.graph_node) X(record, profile_window.is_open) X(record, profile_window.rank) \
    X(record, device_info.name) X(record, device_info.multiprocessors) X(record, device_info.memory_bytes) \
    X(record, device_info.threads_per_multiprocessor) X(record, device_info.blocks_per_multiprocessor) \
    X(record, device_info.registers_per_multiprocessor) X(record, device_info.shared_bytes_per_multiprocessor) \
    X(record, device_info.reserved_shared_bytes_per_block) \
    X(record, communicator.hash) X(record, communicator.communicator) X(record, communicator.name) \
    X(record, communicator.rank) X(record, communicator.rank_count) X(record, communicator.profiler_version) \
    X(record, collective.send) X(record, collective.receive) X(record, collective.element_count) \
    X(record, collective.communicator) X(record, collective.sequence) X(record, collective.group) \
    X(record, collective.root) X(record, collective.graph) X(record, collective.node) \
    X(record, collective.function) X(record, collective.datatype) X(record, collective.name) \
    X(record, gap.reason) X(record, gap.count)
/* clang-format on */

/* Set offset_dicts[structure][field] = offset. Return 0, or -1 with an exception set. */
static int set_offset(PyObject *offset_dicts, const char *structure, const char *field, size_t offset)
{
    PyObject *fields = PyDict_GetItemString(offset_dicts, structure); /* borrowed reference */
    if (!fields) {
        fields = PyDict_New();
        if (!fields || PyDict_SetItemString(offset_dicts, structure, fields)) {
            Py_XDECREF(fields);
            return -1;
        }
        Py_DECREF(fields);
    }
    PyObject *offset_object = PyLong_FromSize_t(offset);
    int has_failed = !offset_object || PyDict_SetItemString(fields, field, offset_object);
    Py_XDECREF(offset_object);
    return has_failed ? -1 : 0;
}

PyDoc_STRVAR(offsets_doc, "offsets()\n--\n\n"
                          "Return {struct: {field: byte offset}}: the structs of the Sanitizer API that\n"
                          "the recorder reads, and 'record', which it writes.");

static PyObject *offsets(PyObject *self, PyObject *unused)
{
    PyObject *offset_dicts = PyDict_New();
    int has_failed = !offset_dicts;
    (void)self, (void)unused;
#define X(structure, field) \
    has_failed = has_failed || set_offset(offset_dicts, #structure, #field, offsetof(structure, field));
    SANITIZER_FIELDS(X)
    RECORD_FIELDS(X)
#undef X
    if (has_failed)
        Py_CLEAR(offset_dicts);
    return offset_dicts;
}

static PyMethodDef METHODS[] = {
    {"start", (PyCFunction)(void (*)(void))start, METH_VARARGS | METH_KEYWORDS, start_doc},
    {"read", read_all, METH_NOARGS, read_doc},
    {"finish", finish, METH_NOARGS, finish_doc},
    {"stop", stop, METH_NOARGS, stop_doc},
    {"check", check, METH_VARARGS, check_doc},
    {"profile", (PyCFunction)(void (*)(void))profile, METH_VARARGS | METH_KEYWORDS, profile_doc},
    {"check_profile", check_profile, METH_VARARGS, check_profile_doc},
    {"counts", counts, METH_NOARGS, counts_doc},
    {"alloc", (PyCFunction)(void (*)(void))pool_alloc, METH_VARARGS | METH_KEYWORDS, alloc_doc},
    {"free", (PyCFunction)(void (*)(void))pool_free, METH_VARARGS | METH_KEYWORDS, free_doc},
    {"mark", mark, METH_VARARGS, mark_doc},
    {"out_of_memory", out_of_memory, METH_VARARGS, out_of_memory_doc},
    {"with_call_site", with_call_site, METH_VARARGS, with_call_site_doc},
    {"offsets", offsets, METH_NOARGS, offsets_doc},
    {NULL, NULL, 0, NULL},
};

/* A module without slots, because the limited API of 3.11 has neither Py_mod_gil nor Py_mod_multiple_interpreters. */
static struct PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT, .m_name = "_recorder", .m_doc = "Records what CUDA does in this process.",
    .m_size = 0,           .m_methods = METHODS,
};

PyMODINIT_FUNC PyInit__recorder(void)
{
    return PyModuleDef_Init(&MODULE);
}
