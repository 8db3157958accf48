// The model of the memory page: memory of a device over time, derived from the recorded arrays.
//
// Code names a moment by the index of an event, and means the state after that event; -1 means the state
// before the first event. core/memory/present/page.py writes the arrays.

import { CallTree } from "./flame.js";

// Number of events in one bucket: drawings of long traces use one summary per bucket.
const BUCKET = 64;
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
        return { ids: arrays.range, name: nameFrom(facts.range_names, "outside of ranges") };
      default:
        return { ids: arrays.stack, name: (id) => this.stackText(id), names: (ids) => this.distinctTexts(ids) };
    }
  }

  /** Return the call site of a stack as text. */
  stackText(stack) {
    const site = this.arrays.stack_site[stack];
    return site ? this.frameTexts[site - 1] : NO_STACK;
  }

  /** Return the call sites of stacks as texts. Stacks with equal call sites also show the first frame that differs. */
  distinctTexts(stacks) {
    const texts = stacks.map((stack) => this.stackText(stack));
    const frames = new Map();
    const framesOf = (stack) => frames.get(stack) || frames.set(stack, this.tree.path(this.arrays.stack_node[stack])).get(stack);
    return texts.map((text, i) => {
      const sameSite = stacks.filter((stack, j) => stack !== stacks[i] && texts[j] === text).slice(0, 50);
      if (!sameSite.length) return text;
      const path = framesOf(stacks[i]);
      const depth = path.findIndex((frame, j) => sameSite.some((stack) => framesOf(stack)[j] !== frame));
      return depth < 0 || this.frameTexts[path[depth]] === text ? text : `${text} ← ${this.frameTexts[path[depth]]}`;
    });
  }

  /** Return the frames of a stack as texts, innermost first. */
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

/**
 * The memory of the largest groups at every event, for stacked bands.
 *
 * bandOf[i] is the band of allocation i; the last band has all other groups. An allocation that a filter
 * excludes has band -1. The summary of a bucket is the state at the event with the most memory in it.
 */
export class Bands {
  constructor(model, grouping, mask, limit) {
    this.model = model;
    this.names = [];
    this.bandOf = this.#assign(grouping, mask, limit);
    this.buckets = Math.ceil((model.events + 1) / BUCKET);
    const width = this.names.length;
    this.starts = new Float64Array(this.buckets * width);
    this.highest = new Float64Array(this.buckets * width);
    this.totals = new Float64Array(this.buckets);
    this.#summarize();
  }

  #assign(grouping, mask, limit) {
    const { model } = this;
    const largest = model.groupsAt(model.facts.peak_event, grouping, mask).slice(0, limit);
    const band = new Map(largest.map((group, i) => [group.id, i]));
    this.ids = largest.map((group) => group.id);
    this.names = grouping.names ? grouping.names(this.ids) : this.ids.map(grouping.name);
    this.names.push("all others");
    const bands = new Int8Array(model.count);
    for (let i = 0; i < bands.length; i++) {
      const excluded = mask && !mask[model.arrays.stack[i]];
      bands[i] = excluded ? -1 : (band.get(grouping.ids[i]) ?? largest.length);
    }
    return bands;
  }

  #summarize() {
    const width = this.names.length;
    const state = new BandState(this, -1, new Float64Array(width));
    for (let bucket = 0; bucket < this.buckets; bucket++) {
      const first = bucket * BUCKET - 1;
      state.advanceTo(first);
      this.starts.set(state.values, bucket * width);
      const last = Math.min(first + BUCKET - 1, this.model.events - 1);
      this.totals[bucket] = state.copyHighest(first, last, this.highest, bucket * width);
    }
  }

  /** Return the number of allocations whose end is at or before an event. */
  endedUntil(event) {
    const { byEnd, end, count } = this.model;
    let low = 0;
    let high = count;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (end[byEnd[middle]] <= event) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  /**
   * Return the bytes of each band for each of `columns` equal parts of the events from first to last. The value
   * of a part is that at its event with the most memory. Item column * (number of bands) + band of the array.
   */
  sample(first, last, columns) {
    const perColumn = (last - first) / columns;
    return perColumn >= BUCKET ? this.#sampleBuckets(first, last, columns) : this.#sampleEvents(first, last, columns);
  }

  #sampleBuckets(first, last, columns) {
    const width = this.names.length;
    const samples = new Float64Array(columns * width);
    for (let column = 0; column < columns; column++) {
      const from = bucketOf(first + ((last - first) * column) / columns, this.buckets);
      const to = bucketOf(first + ((last - first) * (column + 1)) / columns, this.buckets);
      let highest = from;
      for (let bucket = from; bucket <= to; bucket++) if (this.totals[bucket] > this.totals[highest]) highest = bucket;
      samples.set(this.highest.subarray(highest * width, (highest + 1) * width), column * width);
    }
    return samples;
  }

  #sampleEvents(first, last, columns) {
    const width = this.names.length;
    const samples = new Float64Array(columns * width);
    const bucket = bucketOf(first, this.buckets);
    const values = this.starts.slice(bucket * width, (bucket + 1) * width);
    const state = new BandState(this, bucket * BUCKET - 1, values);
    for (let column = 0; column < columns; column++) {
      const from = Math.floor(first + ((last - first) * column) / columns);
      const to = Math.max(from, Math.ceil(first + ((last - first) * (column + 1)) / columns) - 1);
      state.copyHighest(from, to, samples, column * width);
    }
    return samples;
  }
}

/** The bytes of each band after one event; the state can only advance to later events. */
class BandState {
  constructor(bands, event, values) {
    const { model } = bands;
    this.values = values;
    this.total = values.reduce((sum, value) => sum + value, 0);
    this.bandOf = bands.bandOf;
    this.model = model;
    this.begun = event < 0 ? 0 : model.begunUntil(event);
    this.ended = bands.endedUntil(event);
  }

  /** Change the values to the state after an event. */
  advanceTo(event) {
    const { begin, end, byEnd, size, count } = this.model;
    const { bandOf } = this;
    for (; this.begun < count && begin[this.begun] <= event; this.begun++) this.#change(bandOf[this.begun], size[this.begun]);
    for (; this.ended < count && end[byEnd[this.ended]] <= event; this.ended++) {
      const index = byEnd[this.ended];
      this.#change(bandOf[index], -size[index]);
    }
  }

  #change(band, bytes) {
    if (band < 0) return;
    this.values[band] += bytes;
    this.total += bytes;
  }

  /** Copy the values at the event with the most memory, of the events from first to last; return their sum. */
  copyHighest(first, last, target, offset) {
    let highest = -1;
    for (let event = first; event <= last; event++) {
      this.advanceTo(event);
      if (this.total > highest) {
        highest = this.total;
        target.set(this.values, offset);
      }
    }
    return highest;
  }
}

function bucketOf(event, buckets) {
  return Math.max(0, Math.min(buckets - 1, Math.floor((event + 1) / BUCKET)));
}

/** Samples a curve for drawing: the highest value in each of equal parts of the events. */
export class CurveSampler {
  constructor(curve) {
    this.curve = curve;
    this.highest = new Float64Array(Math.ceil(curve.length / BUCKET));
    for (let i = 0; i < curve.length; i++) {
      const bucket = Math.floor(i / BUCKET);
      if (curve[i] > this.highest[bucket]) this.highest[bucket] = curve[i];
    }
  }

  /** Return the highest values in `columns` equal parts of the events from first to last. */
  sample(first, last, columns) {
    const samples = new Float64Array(columns);
    const perColumn = (last - first) / columns;
    const [values, scale] = perColumn >= BUCKET ? [this.highest, BUCKET] : [this.curve, 1];
    for (let column = 0; column < columns; column++) {
      const from = Math.floor((first + 1 + perColumn * column) / scale);
      const to = Math.ceil((first + 1 + perColumn * (column + 1)) / scale) - 1;
      for (let i = Math.max(from, 0); i <= Math.min(Math.max(to, from), values.length - 1); i++) {
        if (values[i] > samples[column]) samples[column] = values[i];
      }
    }
    return samples;
  }
}

/**
 * Addresses without the gaps between segments. The position of an address is the number of bytes below it
 * that were reserved at some time.
 */
export class AddressSpace {
  constructor(model) {
    const { segment_address: address, segment_size: size } = model.arrays;
    const order = Array.from(address, (_, i) => i).sort((a, b) => address[a] - address[b]);
    this.starts = [];
    this.positions = [];
    let end = -1;
    let position = 0;
    for (const i of order) {
      const from = Math.max(address[i], end);
      const to = address[i] + size[i];
      if (to <= from) continue;
      if (address[i] > end) {
        this.starts.push(address[i]);
        this.positions.push(position);
      }
      position += to - from;
      end = to;
    }
    this.total = position;
  }

  /** Return the position of an address. */
  position(address) {
    let low = 0;
    let high = this.starts.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.starts[middle] <= address) low = middle + 1;
      else high = middle;
    }
    return low ? this.positions[low - 1] + address - this.starts[low - 1] : 0;
  }

  /** Return the address at a position. */
  addressAt(position) {
    let low = 0;
    let high = this.positions.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.positions[middle] <= position) low = middle + 1;
      else high = middle;
    }
    return low ? this.starts[low - 1] + position - this.positions[low - 1] : 0;
  }
}
