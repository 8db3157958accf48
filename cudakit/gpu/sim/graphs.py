"""Stream capture and graphs of a simulated device."""

from __future__ import annotations

from dataclasses import dataclass

from cudakit.gpu.api import LEGACY, Graph, GraphExec, GraphNode, Stream
from cudakit.gpu.device import Handles
from cudakit.gpu.driver_errors import Status, cuda_error
from cudakit.gpu.sim.context import Context, driver_call
from cudakit.gpu.sim.schedule import Job, Task
from cudakit.gpu.sim.streams import (
    NODES_PER_GRAPH,
    Capture,
    Node,
    Nodes,
    Queue,
    SimStreams,
    update_error,
)
from cudakit.trace import events as trace_events
from cudakit.trace.kinds import NodeType


@dataclass(slots=True, eq=False)
class _Executable:
    """An executable graph. A launch waits for the previous launch, an upload also for the previous upload."""

    graph: int
    nodes: Nodes
    last_launch: tuple[Task, ...] = ()
    last_upload: tuple[Task, ...] = ()


class SimGraphs:
    """The captures and graphs of one device."""

    def __init__(self, context: Context, streams: SimStreams) -> None:
        self.context = context
        self._streams = streams
        self._graphs: Handles[Capture] = Handles("graph")
        self._executables: Handles[_Executable] = Handles("graph executable")

    @driver_call
    def capture_begin(self, stream: Stream) -> None:
        if stream == LEGACY:
            raise cuda_error(
                Status.STREAM_CAPTURE_UNSUPPORTED, detail="the legacy default stream cannot capture"
            )
        queue = self._streams.checked_queue(stream)
        if queue.capture:
            raise cuda_error(Status.ILLEGAL_STATE, detail=f"stream {stream} is already capturing")
        capture = self._graphs.make(
            lambda number: Capture(number, self.context.thread, queue.number)
        )
        queue.capture, queue.nodes = capture, ()
        self._streams.captures.append(capture)
        self.context.emit(trace_events.CaptureBegin(capture.graph, queue.number))

    @driver_call
    def capture_end(self, stream: Stream) -> Graph:
        queue = self._streams.checked_queue(stream)
        capture = self._capture_to_end(queue)
        is_joined = capture.is_joined(queue.nodes)
        self._end_capture(capture)
        self.context.emit(trace_events.CaptureEnd(capture.graph, queue.number))
        if capture.is_invalidated or not is_joined:
            self._graphs.remove(capture.graph)
            unjoined_status = Status.STREAM_CAPTURE_UNJOINED
            status = (
                Status.STREAM_CAPTURE_INVALIDATED if capture.is_invalidated else unjoined_status
            )
            raise cuda_error(status, detail=f"the capture of stream {stream}")
        return Graph(capture.graph)

    @driver_call
    def instantiate(self, graph: Graph) -> GraphExec:
        nodes = tuple(self._graphs[graph].nodes)
        return GraphExec(self._executables.add(_Executable(graph, nodes)))

    @driver_call
    def graph_update(self, executable: GraphExec, graph: Graph) -> None:
        updated_executable, nodes = self._executables[executable], tuple(self._graphs[graph].nodes)
        if reason := update_error(updated_executable.nodes, nodes):
            raise cuda_error(Status.GRAPH_EXEC_UPDATE_FAILURE, detail=reason)
        # Launches that are already enqueued keep the old nodes.
        updated_executable.graph, updated_executable.nodes = graph, nodes

    @driver_call
    def graph_upload(self, executable: GraphExec, stream: Stream) -> None:
        uploaded_executable, queue = (
            self._executables[executable],
            self._streams.uncaptured_queue(stream),
        )
        dependencies = (
            *self._streams.queues.dependencies_of(queue),
            *uploaded_executable.last_launch,
            *uploaded_executable.last_upload,
        )
        delay_ns = self.context.costs.dispatch_ns + self.context.costs.node_ns * len(
            uploaded_executable.nodes
        )
        queue.tail = uploaded_executable.last_upload = (
            self.context.schedule.add(
                Job(NodeType.EMPTY), dependencies, delay_ns=delay_ns, priority=queue.priority
            ),
        )

    @driver_call
    def graph_launch(self, graph: GraphExec, stream: Stream) -> None:
        executable, queue = self._executables[graph], self._streams.checked_queue(stream)
        if queue.capture:
            self._append_captured(queue, queue.capture, executable)
            return
        task_by_node = self._enqueue_nodes(queue, executable)
        body = trace_events.GraphLaunch(queue.number, executable.graph, graph)
        task_by_kernel_node = {
            node.number: task
            for node, task in task_by_node.items()
            if node.job.node_type is NodeType.LAUNCH
        }
        self.context.emit(body, task_by_kernel_node)

    @driver_call
    def count_nodes(self, graph: Graph) -> int:
        """Return the number of nodes of a graph."""
        return len(self._graphs[graph].nodes)

    @driver_call
    def destroy_graph(self, graph: Graph) -> None:
        self._graphs.remove(graph)

    @driver_call
    def destroy_graph_exec(self, graph: GraphExec) -> None:
        self._executables.remove(graph)

    @driver_call
    def capture_id(self, stream: Stream) -> int | None:
        capture = _valid_capture(self._streams.queue_of(stream))
        return capture.graph if capture else None

    @driver_call
    def capture_dependencies(self, stream: Stream) -> tuple[GraphNode, ...]:
        queue = self._streams.queue_of(stream)
        capture = _valid_capture(queue)
        return _node_ids(capture.graph, queue.nodes) if capture else ()

    @driver_call
    def dependencies(self, node: GraphNode) -> tuple[GraphNode, ...]:
        graph, node_number = divmod(node, NODES_PER_GRAPH)
        return _node_ids(graph, self._graphs[graph].nodes[node_number - 1].dependencies)

    def close(self) -> None:
        """Remove all graphs and executables."""
        self._graphs.clear()
        self._executables.clear()

    def _capture_to_end(self, queue: Queue) -> Capture:
        """Return the capture of a stream. Raises CudaError if stream or thread may not end the capture."""
        capture = queue.capture
        if capture is None:
            raise cuda_error(Status.ILLEGAL_STATE, detail=f"stream {queue.number} is not capturing")
        if capture.origin_stream != queue.number:
            capture.is_invalidated = True
            raise cuda_error(
                Status.STREAM_CAPTURE_UNMATCHED,
                detail=f"the capture began in stream {capture.origin_stream}",
            )
        if capture.thread != self.context.thread:
            raise cuda_error(Status.STREAM_CAPTURE_WRONG_THREAD, detail=f"stream {queue.number}")
        return capture

    def _end_capture(self, capture: Capture) -> None:
        capture.is_ended = True
        self._streams.captures.remove(capture)
        for queue in self._streams.queues.other_queues:
            if queue.capture is capture:
                queue.capture, queue.nodes = None, ()

    def _enqueue_nodes(self, queue: Queue, executable: _Executable) -> dict[Node, Task]:
        """Enqueue the nodes of a graph after the earlier work of a stream and the previous launch."""
        first_dependencies = (*self._streams.queues.dependencies_of(queue), *executable.last_launch)
        task_by_node: dict[Node, Task] = {}
        for node in executable.nodes:
            dependencies = [
                task_by_node[dependency] for dependency in node.dependencies
            ] or first_dependencies
            delay_ns = self.context.costs.dispatch_ns + self.context.costs.node_ns * len(
                task_by_node
            )
            task_by_node[node] = self.context.schedule.add(
                node.job, dependencies, delay_ns=delay_ns, priority=queue.priority
            )
        for node, task in task_by_node.items():
            if self.context.activity:
                graph_node = executable.graph * NODES_PER_GRAPH + node.number
                self.context.activity.record_enqueued(task, queue.number, graph_node)
        end_task = self.context.schedule.add(
            Job(NodeType.EMPTY), [*first_dependencies, *task_by_node.values()]
        )
        queue.tail = executable.last_launch = (end_task,)
        return task_by_node

    def _append_captured(self, queue: Queue, capture: Capture, executable: _Executable) -> None:
        """Append the nodes of a launched graph to the captured graph."""
        first_dependencies, node_copies = queue.nodes, dict[Node, Node]()
        for node in executable.nodes:
            dependencies = (
                tuple(node_copies[dependency] for dependency in node.dependencies)
                or first_dependencies
            )
            node_copies[node] = self._streams.append(capture, node.job, dependencies)
        nodes_with_dependents = {
            dependency for node in executable.nodes for dependency in node.dependencies
        }
        last_nodes = tuple(
            node_copies[node] for node in executable.nodes if node not in nodes_with_dependents
        )
        queue.nodes = last_nodes or first_dependencies


def _valid_capture(queue: Queue) -> Capture | None:
    return queue.capture if queue.capture and not queue.capture.is_invalidated else None


def _node_ids(graph: int, nodes: Nodes) -> tuple[GraphNode, ...]:
    """Return ids that are unique among all graphs."""
    return tuple(GraphNode(graph * NODES_PER_GRAPH + node.number) for node in nodes)
