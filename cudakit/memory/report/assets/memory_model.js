// The model of the memory page: memory of a device over time, derived from the recorded arrays.
//
// Code names a moment by the index of an event, and means the state after that event; -1 means the state
// before the first event. memory/report/page.py writes the arrays.

import { CallTree } from "./flame.js";
import { FreeMemory } from "./memory_free.js";

const NO_STACK = "no call stack recorded";

export class MemoryModel {
  constructor(arrays, facts) {
    this.facts = facts;
    this.events = facts.events;
    this.arrays = arrays;
    this.count = arrays.begin.length; // number of allocations
    // Events of each allocation: its allocation, the program's free, and the moment when its block is free.
    this.begin = new Int32Array(this.count);
    this.pending = new Int32Array(this.count);
    this.end = new Int32Array(this.count);
    for (let i = 0; i < this.count; i++) {
      this.begin[i] = arrays.begin[i] - 1;
      this.pending[i] = this.begin[i] + arrays.pending[i];
      this.end[i] = this.pending[i] + arrays.ending[i];
    }
    this.size = arrays.size;
    this.requested = arrays.requested;
    this.address = arrays.address;
    this.byEnd = orderBy(this.end, this.events);
    this.eventAllocation = this.#allocationOfEvents();
    this.curves = this.#curves();
    this.free = new FreeMemory(this);
    this.tree = new CallTree(arrays.node_parent, arrays.node_frame, facts.frames);
    this.frameTexts = this.tree.texts;
  }

  /** Return the allocation that each event begins, frees or ends, as an index; -1 for other events. */
  #allocationOfEvents() {
    const allocations = new Int32Array(this.events).fill(-1);
    for (let i = 0; i < this.count; i++) {
      for (const event of [this.begin[i], this.pending[i], this.end[i]]) {
        if (event >= 0 && event < this.events) allocations[event] = i;
      }
    }
    return allocations;
  }

  /** Return the curves of memory in bytes; item e + 1 of a curve is the state after event e. */
  #curves() {
    const curves = { requested: this.#sums(this.requested, this.end) };
    curves.allocated = this.#sums(this.size, this.pending);
    curves.active = this.#sums(this.size, this.end);
    curves.reserved = this.arrays.reserved;
    return curves;
  }

  /** Return the sum of the amounts of the allocations that are between begin and end, for each event. */
  #sums(amounts, ends) {
    const changes = new Float64Array(this.events + 2);
    for (let i = 0; i < this.count; i++) {
      changes[this.begin[i] + 1] += amounts[i];
      changes[Math.min(ends[i], this.events) + 1] -= amounts[i];
    }
    return accumulate(changes);
  }

  /** Return the number of allocations whose begin is at or before an event. */
  begunUntil(event) {
    let low = 0;
    let high = this.count;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.begin[middle] <= event) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  /** Call visit(index) for each allocation in use, or pending free, after an event. */
  forEachLive(event, visit) {
    const until = this.begunUntil(event);
    for (let i = 0; i < until; i++) if (this.end[i] > event) visit(i);
  }

  /** Return the state after an event: bytes by kind of total, and the number of blocks. */
  totalsAt(event) {
    let blocks = 0;
    this.forEachLive(event, () => blocks++);
    const at = (name) => this.curves[name][event + 1];
    return { requested: at("requested"), allocated: at("allocated"), active: at("active"), reserved: at("reserved"), blocks };
  }

  /** Return the indices of the segments that are reserved after an event, sorted by address. */
  segmentsAt(event) {
    const { segment_begin: begins, segment_end: ends, segment_address: address } = this.arrays;
    const segments = [];
    for (let i = 0; i < begins.length; i++) if (begins[i] - 1 <= event && ends[i] > event) segments.push(i);
    return segments.sort((a, b) => address[a] - address[b]);
  }

  /** Return a grouping: the id of the group of each allocation, and a function that returns a group's name. */
  grouping(kind) {
    const { arrays, facts } = this;
    const nameFrom = (names, fallback) => (id) => names[id] || fallback;
    switch (kind) {
      case "line":
        return {
          ids: callSites(arrays),
          name: (id) => (id ? this.frameTexts[id - 1] : NO_STACK),
        };
      case "stream":
        return { ids: arrays.stream, name: (id) => (id ? `stream ${id}` : "default stream") };
      case "pool":
        return { ids: arrays.pool, name: nameFrom(facts.pools, "default") };
      case "category":
        return { ids: arrays.category, name: nameFrom(facts.texts, "no category") };
      case "range":
        return { ids: arrays.range, name: nameFrom(facts.range_names, "no annotation") };
      default:
        return { ids: arrays.stack, name: (id) => this.stackText(id), names: (ids) => this.distinctTexts(ids) };
    }
  }

  /** Return the call site of a stack as text. */
  stackText(stack) {
    const site = this.arrays.stack_site[stack];
    return site ? this.frameTexts[site - 1] : NO_STACK;
  }

  /**
   * Return the call sites of stacks as texts. Stacks with equal call sites also show the first frame that differs:
   * `site → frame` for a frame that the call site calls, `site ← frame` for a caller, as in the tables.
   */
  distinctTexts(stacks) {
    const texts = stacks.map((stack) => this.stackText(stack));
    const frames = new Map();
    const framesOf = (stack) => frames.get(stack) || frames.set(stack, this.tree.path(this.arrays.stack_node[stack])).get(stack);
    return texts.map((text, i) => {
      const sameSite = stacks.filter((stack, j) => stack !== stacks[i] && texts[j] === text).slice(0, 50);
      if (!sameSite.length) return text;
      const path = framesOf(stacks[i]);
      const depth = path.findIndex((frame, j) => sameSite.some((stack) => framesOf(stack)[j] !== frame));
      if (depth < 0 || this.frameTexts[path[depth]] === text) return text;
      const arrow = depth < path.indexOf(this.arrays.stack_site[stacks[i]] - 1) ? "→" : "←";
      return `${text} ${arrow} ${this.frameTexts[path[depth]]}`;
    });
  }

  /** Return the frames of a stack as short texts, innermost first. */
  stackTexts(stack) {
    return this.tree.path(this.arrays.stack_node[stack]).map((frame) => this.frameTexts[frame]);
  }

  /** Return the frames of a stack with full paths, innermost first. */
  stackFrames(stack) {
    return this.tree.path(this.arrays.stack_node[stack]).map((frame) => {
      const [name, file, line] = this.facts.frames[frame];
      return file ? `${file}${line ? `:${line}` : ""} ${name}` : name;
    });
  }

  /** Return a mask of the stacks in which a frame contains the text; null if the text is empty. */
  stacksWith(text) {
    if (!text) return null;
    const searchText = text.toLowerCase();
    const frameMatches = this.facts.frames.map(([name, file, line]) => `${file}:${line} ${name}`.toLowerCase().includes(searchText));
    const { node_parent: parent, node_frame: frame, stack_node: leaf } = this.arrays;
    const nodeMatches = new Uint8Array(parent.length);
    for (let node = 1; node < parent.length; node++) nodeMatches[node] = nodeMatches[parent[node]] | frameMatches[frame[node]];
    return Uint8Array.from(leaf, (node) => nodeMatches[node]);
  }

  /** Return the bytes and the number of blocks of each group after an event, the largest group first. */
  groupsAt(event, grouping, mask) {
    const groups = new Map();
    this.forEachLive(event, (i) => {
      if (mask && !mask[this.arrays.stack[i]]) return;
      const id = grouping.ids[i];
      const group = groups.get(id) || { id, bytes: 0, blocks: 0 };
      group.bytes += this.size[i];
      group.blocks += 1;
      groups.set(id, group);
    });
    return [...groups.values()].sort((a, b) => b.bytes - a.bytes || a.id - b.id);
  }

  /** Return the bytes in use after an event, for each stack. */
  stackBytesAt(event, mask) {
    const bytes = new Float64Array(this.arrays.stack_node.length);
    this.forEachLive(event, (i) => (bytes[this.arrays.stack[i]] += this.size[i]));
    return applyMask(bytes, mask);
  }

  /** Return the bytes that the events from first to last allocated, for each stack. */
  stackBytesAllocated(first, last, mask) {
    const bytes = new Float64Array(this.arrays.stack_node.length);
    const until = this.begunUntil(last);
    for (let i = this.begunUntil(first - 1); i < until; i++) bytes[this.arrays.stack[i]] += this.size[i];
    return applyMask(bytes, mask);
  }

  /** Return the first event from `first` to `last` after which the most memory is requested. */
  peakBetween(first, last) {
    const { requested } = this.curves;
    let peak = first;
    for (let event = first; event <= last; event++) if (requested[event + 1] > requested[peak + 1]) peak = event;
    return peak;
  }

  /** Return the self bytes of each node of the call tree: those of stacks that end at the node. */
  selfBytes(stackBytes) {
    const bytes = new Float64Array(this.tree.parent.length);
    for (let stack = 0; stack < stackBytes.length; stack++) bytes[this.arrays.stack_node[stack]] += stackBytes[stack];
    return bytes;
  }
}

/** Return the call site of each allocation: a frame index plus 1, or 0. */
function callSites({ stack, stack_site: site }) {
  const ids = new Int32Array(stack.length);
  for (let i = 0; i < ids.length; i++) ids[i] = site[stack[i]];
  return ids;
}

/** Set the bytes of stacks outside the mask to 0, and return the array. */
function applyMask(bytes, mask) {
  if (mask) for (let stack = 0; stack < bytes.length; stack++) if (!mask[stack]) bytes[stack] = 0;
  return bytes;
}

/** Replace each change by the sum of all changes up to it, and return the array. */
function accumulate(changes) {
  for (let i = 1; i < changes.length; i++) changes[i] += changes[i - 1];
  return changes;
}

/** Return the indices that sort values from -1 to `events`, by a counting sort. */
function orderBy(values, events) {
  const starts = new Uint32Array(events + 3);
  for (let i = 0; i < values.length; i++) starts[Math.min(values[i], events) + 2]++;
  for (let i = 1; i < starts.length; i++) starts[i] += starts[i - 1];
  const order = new Uint32Array(values.length);
  for (let i = 0; i < values.length; i++) order[starts[Math.min(values[i], events) + 1]++] = i;
  return order;
}
