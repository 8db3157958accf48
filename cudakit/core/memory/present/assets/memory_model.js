// The memory of a device over time: everything that the page derives from the recorded arrays.
//
// An instant is the index of an event: the state after it; -1 is before the first one. The arrays come from
// core/memory/present/page.py.

import { CallTree } from "./flame.js";

// Events that are summarized together for drawings of long traces.
const BUCKET = 64;
const NO_STACK = "no call stack recorded";

export class MemoryModel {
  constructor(arrays, facts) {
    this.facts = facts;
    this.events = facts.events;
    this.arrays = arrays;
    const n = arrays.begin.length;
    this.count = n;
    this.begin = new Int32Array(n);
    this.pending = new Int32Array(n);
    this.end = new Int32Array(n);
    for (let i = 0; i < n; i++) {
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

  #allocationOfEvents() {
    const found = new Int32Array(this.events).fill(-1);
    for (let i = 0; i < this.count; i++) {
      for (const event of [this.begin[i], this.pending[i], this.end[i]]) {
        if (event >= 0 && event < this.events) found[event] = i;
      }
    }
    return found;
  }

  /** Bytes at each instant; item e + 1 is the state after event e. */
  #curves() {
    const curves = { requested: this.#sums(this.requested, this.end) };
    curves.allocated = this.#sums(this.size, this.pending);
    curves.active = this.#sums(this.size, this.end);
    curves.reserved = this.arrays.reserved;
    return curves;
  }

  #sums(amounts, ends) {
    const changes = new Float64Array(this.events + 2);
    for (let i = 0; i < this.count; i++) {
      changes[this.begin[i] + 1] += amounts[i];
      changes[Math.min(ends[i], this.events) + 1] -= amounts[i];
    }
    return accumulate(changes);
  }

  /** Return the number of allocations that began until an event. */
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

  /** Return the totals after an event: bytes, and the number of blocks. */
  totalsAt(event) {
    let blocks = 0;
    this.forEachLive(event, () => blocks++);
    const at = (name) => this.curves[name][event + 1];
    return { requested: at("requested"), allocated: at("allocated"), active: at("active"), reserved: at("reserved"), blocks };
  }

  /** Return the segments that were reserved after an event, by address, as indices. */
  segmentsAt(event) {
    const { segment_begin: begins, segment_end: ends, segment_address: address } = this.arrays;
    const found = [];
    for (let i = 0; i < begins.length; i++) if (begins[i] - 1 <= event && ends[i] > event) found.push(i);
    return found.sort((a, b) => address[a] - address[b]);
  }

  /** Return a grouping of all allocations: an id for each, and the name of each id. */
  grouping(kind) {
    const { arrays, facts } = this;
    const texts = (names, none) => (id) => names[id] || none;
    switch (kind) {
      case "line":
        return {
          ids: siteOfEach(arrays),
          name: (id) => (id ? this.frameTexts[id - 1] : NO_STACK),
        };
      case "stream":
        return { ids: arrays.stream, name: (id) => (id ? `stream ${id}` : "default stream") };
      case "pool":
        return { ids: arrays.pool, name: texts(facts.pools, "default") };
      case "category":
        return { ids: arrays.category, name: texts(facts.texts, "no category") };
      case "range":
        return { ids: arrays.range, name: texts(facts.range_names, "outside of ranges") };
      default:
        return { ids: arrays.stack, name: (id) => this.stackText(id), names: (ids) => this.distinctTexts(ids) };
    }
  }

  /** Return a short text of a stack: its call site. */
  stackText(stack) {
    const site = this.arrays.stack_site[stack];
    return site ? this.frameTexts[site - 1] : NO_STACK;
  }

  /** Return short texts of stacks; those with the same call site also show the first frame in which they differ. */
  distinctTexts(stacks) {
    const texts = stacks.map((stack) => this.stackText(stack));
    const frames = new Map();
    const framesOf = (stack) => frames.get(stack) || frames.set(stack, this.tree.path(this.arrays.stack_node[stack])).get(stack);
    return texts.map((text, i) => {
      const alike = stacks.filter((stack, j) => stack !== stacks[i] && texts[j] === text).slice(0, 50);
      if (!alike.length) return text;
      const mine = framesOf(stacks[i]);
      const depth = mine.findIndex((frame, at) => alike.some((stack) => framesOf(stack)[at] !== frame));
      return depth < 0 || this.frameTexts[mine[depth]] === text ? text : `${text} ← ${this.frameTexts[mine[depth]]}`;
    });
  }

  /** Return the frames of a stack as texts, innermost first. */
  stackFrames(stack) {
    return this.tree.path(this.arrays.stack_node[stack]).map((frame) => {
      const [name, file, line] = this.facts.frames[frame];
      return file ? `${file}${line ? `:${line}` : ""} ${name}` : name;
    });
  }

  /** Return a mask of the stacks one of whose frames contains a text; null if the text is empty. */
  stacksWith(text) {
    if (!text) return null;
    const wanted = text.toLowerCase();
    const frames = this.facts.frames.map(([name, file, line]) => `${file}:${line} ${name}`.toLowerCase().includes(wanted));
    const { node_parent: parent, node_frame: frame, stack_node: leaf } = this.arrays;
    const nodes = new Uint8Array(parent.length);
    for (let node = 1; node < nodes.length; node++) nodes[node] = nodes[parent[node]] | frames[frame[node]];
    return Uint8Array.from(leaf, (node) => nodes[node]);
  }

  /** Return bytes and blocks of each group after an event, the largest first: {id, bytes, blocks}. */
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

  /** Return bytes for each stack: in use after an event. */
  stackBytesAt(event, mask) {
    const bytes = new Float64Array(this.arrays.stack_node.length);
    this.forEachLive(event, (i) => (bytes[this.arrays.stack[i]] += this.size[i]));
    return masked(bytes, mask);
  }

  /** Return bytes for each stack: allocated by the events from first to last. */
  stackBytesAllocated(first, last, mask) {
    const bytes = new Float64Array(this.arrays.stack_node.length);
    const until = this.begunUntil(last);
    for (let i = this.begunUntil(first - 1); i < until; i++) bytes[this.arrays.stack[i]] += this.size[i];
    return masked(bytes, mask);
  }

  /** Return the own bytes of each node of the call tree. */
  ownBytes(stackBytes) {
    const own = new Float64Array(this.tree.parent.length);
    for (let stack = 0; stack < stackBytes.length; stack++) own[this.arrays.stack_node[stack]] += stackBytes[stack];
    return own;
  }
}

function siteOfEach({ stack, stack_site: site }) {
  const ids = new Int32Array(stack.length);
  for (let i = 0; i < ids.length; i++) ids[i] = site[stack[i]];
  return ids;
}

function masked(bytes, mask) {
  if (mask) for (let stack = 0; stack < bytes.length; stack++) if (!mask[stack]) bytes[stack] = 0;
  return bytes;
}

function accumulate(changes) {
  for (let i = 1; i < changes.length; i++) changes[i] += changes[i - 1];
  return changes;
}

/** Return the indices of values from -1 to events in their order, by counting. */
function orderBy(values, events) {
  const starts = new Uint32Array(events + 3);
  for (let i = 0; i < values.length; i++) starts[Math.min(values[i], events) + 2]++;
  for (let i = 1; i < starts.length; i++) starts[i] += starts[i - 1];
  const order = new Uint32Array(values.length);
  for (let i = 0; i < values.length; i++) order[starts[Math.min(values[i], events) + 1]++] = i;
  return order;
}

/**
 * The memory of the largest groups at every instant, for stacked bands.
 *
 * bandOf[i] is the band of allocation i; the last band has all other groups. An allocation that a filter
 * excludes has band -1. Long stretches are summarized by the instant with the most memory of each bucket.
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
    const walk = new Walk(this, -1, new Float64Array(width));
    for (let bucket = 0; bucket < this.buckets; bucket++) {
      const first = bucket * BUCKET - 1;
      walk.to(first);
      this.starts.set(walk.values, bucket * width);
      const last = Math.min(first + BUCKET - 1, this.model.events - 1);
      this.totals[bucket] = walk.highest(first, last, this.highest, bucket * width);
    }
  }

  /** Return the number of allocations that ended until an event. */
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
   * Return the values of all bands for each of `columns` equal parts of the events from first to last: at the
   * instant of the part with the most memory. Item column * bands + band.
   */
  sample(first, last, columns) {
    const perColumn = (last - first) / columns;
    return perColumn >= BUCKET ? this.#sampleBuckets(first, last, columns) : this.#sampleEvents(first, last, columns);
  }

  #sampleBuckets(first, last, columns) {
    const width = this.names.length;
    const found = new Float64Array(columns * width);
    for (let column = 0; column < columns; column++) {
      const from = bucketOf(first + ((last - first) * column) / columns, this.buckets);
      const to = bucketOf(first + ((last - first) * (column + 1)) / columns, this.buckets);
      let best = from;
      for (let bucket = from; bucket <= to; bucket++) if (this.totals[bucket] > this.totals[best]) best = bucket;
      found.set(this.highest.subarray(best * width, (best + 1) * width), column * width);
    }
    return found;
  }

  #sampleEvents(first, last, columns) {
    const width = this.names.length;
    const found = new Float64Array(columns * width);
    const bucket = bucketOf(first, this.buckets);
    const values = this.starts.slice(bucket * width, (bucket + 1) * width);
    const walk = new Walk(this, bucket * BUCKET - 1, values);
    for (let column = 0; column < columns; column++) {
      const from = Math.floor(first + ((last - first) * column) / columns);
      const to = Math.max(from, Math.ceil(first + ((last - first) * (column + 1)) / columns) - 1);
      walk.highest(from, to, found, column * width);
    }
    return found;
  }
}

/** The values of all bands, brought forward from event to event. */
class Walk {
  constructor(bands, event, values) {
    const { model } = bands;
    this.values = values;
    this.total = values.reduce((sum, value) => sum + value, 0);
    this.bandOf = bands.bandOf;
    this.model = model;
    this.begun = event < 0 ? 0 : model.begunUntil(event);
    this.ended = bands.endedUntil(event);
  }

  /** Bring the values to the state after an event. */
  to(event) {
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

  /** Copy the values of the instant with the most memory, of those from first to last; return their sum. */
  highest(first, last, target, offset) {
    let highest = -1;
    for (let event = first; event <= last; event++) {
      this.to(event);
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

/** Return the highest value of a curve in each of `columns` equal parts of the events from first to last. */
export class CurveSampler {
  constructor(curve) {
    this.curve = curve;
    this.highest = new Float64Array(Math.ceil(curve.length / BUCKET));
    for (let i = 0; i < curve.length; i++) {
      const bucket = Math.floor(i / BUCKET);
      if (curve[i] > this.highest[bucket]) this.highest[bucket] = curve[i];
    }
  }

  sample(first, last, columns) {
    const found = new Float64Array(columns);
    const perColumn = (last - first) / columns;
    const [values, scale] = perColumn >= BUCKET ? [this.highest, BUCKET] : [this.curve, 1];
    for (let column = 0; column < columns; column++) {
      const from = Math.floor((first + 1 + perColumn * column) / scale);
      const to = Math.ceil((first + 1 + perColumn * (column + 1)) / scale) - 1;
      for (let i = Math.max(from, 0); i <= Math.min(Math.max(to, from), values.length - 1); i++) {
        if (values[i] > found[column]) found[column] = values[i];
      }
    }
    return found;
  }
}

/**
 * Addresses without the gaps between segments: position(address) counts the bytes of all ranges that were
 * ever reserved below it.
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
