// The model of the profile page: GPU work, API calls, ranges and idle time as sorted arrays, and their sums.
//
// Times are nanoseconds after the first activity. profile/report/page.py writes the arrays. A signature is a
// call stack, a name and a launch configuration; sums by kernel, line and stack are sums over signatures.

import { CallTree } from "./flame.js";

// Number of edges at which sums are stored, and of stored sums: they bound the time and the memory of sums.
const MOST_EDGES = 64;
const MOST_SUMS = 4e6;

export const NO_STACK = "no call stack recorded";

/** Return the index of the first item of a sorted array that is at least a value, or greater if `above`. */
export function firstAtLeast(sorted, value, above = false) {
  let low = 0;
  let high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < value || (above && sorted[middle] === value)) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** Spans sorted by start: their starts, ends, and the row of the timeline of each. */
class Spans {
  constructor(arrays, name) {
    this.start = arrays[`${name}_start`];
    this.duration = arrays[`${name}_duration`];
    this.count = this.start.length;
    this.end = new Float64Array(this.count);
    // Item i is the latest end of the spans up to i; it never decreases, so that it can be searched.
    this.latestEnd = new Float64Array(this.count);
    let latest = -Infinity;
    for (let i = 0; i < this.count; i++) {
      this.end[i] = this.start[i] + this.duration[i];
      if (this.end[i] > latest) latest = this.end[i];
      this.latestEnd[i] = latest;
    }
    this.row = arrays[`${name}_row`]; // number of the row, from 1; 0 if no row draws the span
  }

  /**
   * Return the index of the first span that may be in a window, and the index after the last one. Some of the spans
   * between them may have ended before the window.
   */
  indicesIn(first, last) {
    return [firstAtLeast(this.latestEnd, first), firstAtLeast(this.start, last)];
  }

  /** Return the part of a span within a window, in ns. */
  within(i, first, last) {
    return Math.max(0, Math.min(this.end[i], last) - Math.max(this.start[i], first));
  }
}

/** A row of the timeline. Its spans do not overlap; they are sorted by start, and so by end. */
class Row {
  constructor(spans, indices, [source, label, group]) {
    Object.assign(this, { spans, source, label, group, count: indices.length, indices });
    this.start = new Float64Array(this.count);
    this.end = new Float64Array(this.count);
    // Item i is the sum of the durations before item i.
    this.sums = new Float64Array(this.count + 1);
    for (let i = 0; i < this.count; i++) {
      this.start[i] = spans.start[indices[i]];
      this.end[i] = spans.end[indices[i]];
      this.sums[i + 1] = this.sums[i] + (this.end[i] - this.start[i]);
    }
  }

  /** Return the index in the row of the span at a time, or of the span nearest to it within a distance; -1 if none. */
  at(time, distance) {
    const after = firstAtLeast(this.end, time);
    let best = -1;
    let bestGap = distance;
    for (const i of [after, after - 1]) {
      if (i < 0 || i >= this.count) continue;
      const gap = Math.max(this.start[i] - time, time - this.end[i], 0);
      if (gap <= bestGap) [best, bestGap] = [i, gap];
    }
    return best;
  }

  /** Return the time that the spans cover before a time, in ns. */
  coveredUntil(time) {
    const i = firstAtLeast(this.end, time, true);
    return this.sums[i] + (i < this.count ? Math.max(0, time - this.start[i]) : 0);
  }
}

/** The time in which at least one span of a device ran, as sorted intervals without overlaps. */
class BusyTime {
  constructor() {
    this.start = [];
    this.end = [];
  }

  /** Add a span; spans are added in the order of their starts. */
  add(start, end) {
    const last = this.end.length - 1;
    if (last >= 0 && start <= this.end[last]) this.end[last] = Math.max(this.end[last], end);
    else {
      this.start.push(start);
      this.end.push(end);
    }
  }

  /** Prepare the sums after the last span was added. */
  complete() {
    this.row = new Row(this, Uint32Array.from(this.start.keys()), ["busy", "", ""]);
    [this.start, this.end] = [null, null];
  }

  /** Return the busy time in a window, in ns. */
  within(first, last) {
    return this.row.coveredUntil(last) - this.row.coveredUntil(first);
  }
}

/** The sums of the durations of consecutive work by signature. They are stored at the edges of blocks of work. */
class SignatureSums {
  constructor(work, signatures) {
    Object.assign(this, { work, signatures });
    const edges = Math.max(1, Math.min(MOST_EDGES, Math.floor(MOST_SUMS / Math.max(signatures, 1))));
    this.blockLength = Math.max(1, Math.ceil(work.count / edges));
    const stored = Math.floor(work.count / this.blockLength) + 1;
    // The sums of all work before block b begin at item b * signatures.
    this.time = new Float64Array(stored * signatures);
    this.count = new Uint32Array(stored * signatures);
    for (let block = 1; block < stored; block++) {
      const offset = block * signatures;
      this.time.copyWithin(offset, offset - signatures, offset);
      this.count.copyWithin(offset, offset - signatures, offset);
      this.#add(this.time.subarray(offset, offset + signatures), this.count.subarray(offset, offset + signatures), (block - 1) * this.blockLength, block * this.blockLength, 1);
    }
  }

  #add(time, count, from, to, sign) {
    const { signature, duration } = this.work;
    for (let i = from; i < to; i++) {
      time[signature[i]] += sign * duration[i];
      count[signature[i]] += sign;
    }
  }

  /** Return the sums of the work from one index up to another one. */
  between(from, to) {
    const { signatures, blockLength } = this;
    const [first, last] = [Math.floor(from / blockLength), Math.floor(to / blockLength)];
    const time = this.time.slice(last * signatures, (last + 1) * signatures);
    const count = this.count.slice(last * signatures, (last + 1) * signatures);
    for (let signature = 0; signature < signatures; signature++) {
      time[signature] -= this.time[first * signatures + signature];
      count[signature] -= this.count[first * signatures + signature];
    }
    this.#add(time, count, last * blockLength, to, 1);
    this.#add(time, count, first * blockLength, from, -1);
    return { time, count };
  }
}

export class ProfileModel {
  constructor(arrays, facts) {
    this.arrays = arrays;
    this.facts = facts;
    this.duration = Math.max(facts.duration_ns, 1);
    const work = workByStart(arrays);
    this.work = new Spans({ work_start: work.start, work_duration: work.duration, work_row: lookUp(arrays.track_row, work.track) }, "work");
    Object.assign(this.work, {
      device: lookUp(arrays.track_device, work.track),
      track: work.track,
      kind: work.kind,
      signature: work.signature,
      call: work.call,
      size: work.size,
      inGraph: work.in_graph,
    });
    this.calls = new Spans(arrays, "call");
    this.ranges = new Spans(arrays, "range");
    this.idle = new Spans(arrays, "idle");
    this.signatures = arrays.signature_name.length;
    this.sums = new SignatureSums(this.work, this.signatures);
    this.tree = new CallTree(arrays.node_parent, arrays.node_frame, facts.frames);
    this.rows = this.#rows();
    this.devices = facts.devices.map(([number, name]) => ({ number, name, busy: new BusyTime() }));
    this.#addBusyTime();
    this.workOfCall = this.#workOfCall();
  }

  #rows() {
    const tables = { work: this.work, call: this.calls, range: this.ranges, idle: this.idle };
    const indices = new Map();
    this.facts.rows.forEach(([source], number) => indices.set(`${source} ${number}`, []));
    for (const [source, spans] of Object.entries(tables)) {
      const counts = new Uint32Array(this.facts.rows.length + 1);
      for (let i = 0; i < spans.count; i++) counts[spans.row[i]]++;
      const lists = Array.from(counts, (count) => new Uint32Array(count));
      const filled = new Uint32Array(counts.length);
      for (let i = 0; i < spans.count; i++) lists[spans.row[i]][filled[spans.row[i]]++] = i;
      for (let row = 1; row < lists.length; row++) indices.set(`${source} ${row - 1}`, lists[row]);
    }
    return this.facts.rows.map((row, number) => new Row(tables[row[0]], indices.get(`${row[0]} ${number}`), row));
  }

  #addBusyTime() {
    const { start, end, device, count } = this.work;
    const busyOf = new Map(this.devices.map(({ number, busy }) => [number, busy]));
    for (let i = 0; i < count; i++) if (end[i] > start[i]) busyOf.get(device[i])?.add(start[i], end[i]);
    for (const busy of busyOf.values()) busy.complete();
  }

  /** Return the first work that each call started, as an index; -1 for calls that started none. */
  #workOfCall() {
    const first = new Int32Array(this.calls.count).fill(-1);
    for (let i = this.work.count - 1; i >= 0; i--) if (this.work.call[i] >= 0) first[this.work.call[i]] = i;
    return first;
  }

  /**
   * Return the sums of each signature over a window: the GPU time within it (ns), and the number of pieces of work
   * that overlap it. Work without duration counts if it starts in the window.
   */
  sumsIn(first, last) {
    const { start, end, latestEnd, signature } = this.work;
    const [from, to] = this.work.indicesIn(first, last);
    const begun = Math.min(firstAtLeast(start, first), to); // index of the first work that starts in the window
    const sums = this.sums.between(begun, to);
    for (let i = from; i < begun; i++) {
      if (end[i] <= first) continue;
      sums.time[signature[i]] += Math.min(end[i], last) - first;
      sums.count[signature[i]]++;
    }
    // No work before this index ends after the window.
    for (let i = Math.max(begun, firstAtLeast(latestEnd, last, true)); i < to; i++) if (end[i] > last) sums.time[signature[i]] -= end[i] - last;
    return sums;
  }

  /** Return the GPU time and the number of pieces of work in a window, the busy time of each device, and idle time by cause. */
  totalsIn(first, last) {
    const { time, count } = this.sumsIn(first, last);
    const sum = (values) => values.reduce((total, value) => total + value, 0);
    return {
      time: sum(time),
      count: sum(count),
      busy: Object.fromEntries(this.devices.map(({ number, busy }) => [number, busy.within(first, last)])),
      idle: this.idleIn(first, last),
    };
  }

  /** Return the idle time of each cause in a window, in ns. A gap that the window cuts counts in proportion. */
  idleIn(first, last) {
    const { causes } = this.facts;
    const sums = causes.map(() => 0);
    const [from, to] = this.idle.indicesIn(first, last);
    for (let i = from; i < to; i++) {
      const share = this.idle.duration[i] ? this.idle.within(i, first, last) / this.idle.duration[i] : 0;
      for (let cause = 0; cause < causes.length; cause++) sums[cause] += share * this.arrays[`idle_cause${cause}`][i];
    }
    return sums;
  }

  /** Return the cause with the most time of a gap, as an index. */
  mainCause(i) {
    let best = 0;
    for (let cause = 1; cause < this.facts.causes.length; cause++) {
      if (this.arrays[`idle_cause${cause}`][i] > this.arrays[`idle_cause${best}`][i]) best = cause;
    }
    return best;
  }

  /** Return the group of each signature, and a function that returns the name of a group. */
  grouping(kind) {
    const { signature_name: names, signature_site: sites } = this.arrays;
    if (kind === "line") return { ids: sites, name: (id) => (id ? this.tree.texts[id] : NO_STACK) };
    return { ids: names, name: (id) => this.facts.names[id] };
  }

  /** Return the groups with work in a window, the one with the most GPU time first; a mask selects signatures. */
  groupsIn(first, last, { ids, name }, mask) {
    const { time, count } = this.sumsIn(first, last);
    const groups = new Map();
    for (let signature = 0; signature < this.signatures; signature++) {
      if (!count[signature] || (mask && !mask[signature])) continue;
      const id = ids[signature];
      let group = groups.get(id);
      if (!group) groups.set(id, (group = { id, time: 0, count: 0, name: name(id) }));
      group.time += time[signature];
      group.count += count[signature];
    }
    return [...groups.values()].sort((a, b) => b.time - a.time || a.id - b.id);
  }

  /** Return the self amounts of the nodes of the call tree: the GPU time of the kernels in a window. */
  nodeTimes(first, last, mask) {
    const { time } = this.sumsIn(first, last);
    const amounts = new Float64Array(this.tree.parent.length);
    for (let signature = 0; signature < this.signatures; signature++) {
      if (!mask || mask[signature]) amounts[this.arrays.signature_node[signature]] += time[signature];
    }
    return amounts;
  }

  /** Return for each signature whether its stack or its name contains a text; null if the text is empty. */
  signaturesWith(text) {
    const needle = text.trim().toLowerCase();
    if (!needle) return null;
    const matches = this.facts.frames.map(([name, file, line]) => `${file}:${line} ${name}`.toLowerCase().includes(needle));
    const { parent, frame } = this.tree;
    const contains = new Uint8Array(parent.length);
    for (let node = 1; node < parent.length; node++) contains[node] = contains[parent[node]] || matches[frame[node]] ? 1 : 0;
    return Uint8Array.from(this.arrays.signature_node, (node) => contains[node]);
  }

  streamOfWork(i) {
    return this.arrays.track_stream[this.work.track[i]];
  }

  nameOfWork(i) {
    return this.facts.names[this.arrays.signature_name[this.work.signature[i]]];
  }

  nameOfCall(i) {
    return this.facts.names[this.arrays.call_name[i]];
  }

  nameOfRange(i) {
    return this.facts.names[this.arrays.range_name[i]];
  }

  /** Return the frames of the stack of a piece of work as texts, innermost first, without the kernel. */
  stackOfWork(i) {
    const leaf = this.arrays.signature_node[this.work.signature[i]];
    return this.#texts(this.tree.parent[leaf]);
  }

  /** Return the frames of the stack of an API call as texts, innermost first. */
  stackOfCall(i) {
    if (this.arrays.call_node[i]) return this.#texts(this.arrays.call_node[i]);
    return this.workOfCall[i] >= 0 ? this.stackOfWork(this.workOfCall[i]) : [];
  }

  #texts(node) {
    return this.tree.path(node).map((frame) => this.tree.texts[frame]);
  }

  /** Return the launch configuration of a piece of work, or null for copies and memsets. */
  launchOfWork(i) {
    if (this.work.kind[i]) return null;
    const launch = this.arrays.signature_launch[this.work.signature[i]];
    const value = (name) => this.arrays[`launch_${name}`][launch];
    const size = (name) => ["x", "y", "z"].map((axis) => value(`${name}_${axis}`));
    return { grid: size("grid"), block: size("block"), registers: value("registers"), shared: value("shared") };
  }
}

/** Return an item of a table for each index, as an array of the smallest type that is large enough. */
function lookUp(table, indices) {
  const isSmall = table.every((value) => value < 256);
  const values = isSmall ? new Uint8Array(indices.length) : new Float64Array(indices.length);
  for (let i = 0; i < indices.length; i++) values[i] = table[indices[i]];
  return values;
}

/**
 * Return the columns of GPU work sorted by start. The arrays are sorted by track, and have the gap before each work of
 * its track, and differences of the numbers of calls; number 0 means no call, and becomes -1.
 */
function workByStart(arrays) {
  const { work_gap: gaps, work_duration: duration, work_track: track } = arrays;
  const start = new Float64Array(gaps.length);
  const call = new Int32Array(gaps.length);
  const trackStarts = [];
  for (let i = 0, end = 0, number = 0; i < gaps.length; i++) {
    if (!i || track[i] !== track[i - 1]) {
      trackStarts.push(i);
      end = 0;
    }
    start[i] = end + gaps[i];
    end = start[i] + duration[i];
    number += arrays.work_call[i];
    call[i] = number - 1;
  }
  const order = mergedOrder(start, trackStarts);
  const columns = { start, duration, track, call };
  for (const name of ["kind", "signature", "size", "in_graph"]) columns[name] = arrays[`work_${name}`];
  return Object.fromEntries(Object.entries(columns).map(([name, column]) => [name, column.map((_, i) => column[order[i]])]));
}

/** Return the indices of values in ascending order; the values are sorted within runs, which begin at `runStarts`. */
function mergedOrder(values, runStarts) {
  let order = Uint32Array.from(values.keys());
  let merged = new Uint32Array(values.length);
  let starts = runStarts;
  while (starts.length > 1) {
    for (let run = 0; run < starts.length; run += 2) {
      const middle = starts[run + 1] ?? values.length;
      const last = starts[run + 2] ?? values.length;
      let [left, right] = [starts[run], middle];
      for (let i = starts[run]; i < last; i++) {
        const takesLeft = left < middle && (right >= last || values[order[left]] <= values[order[right]]);
        merged[i] = takesLeft ? order[left++] : order[right++];
      }
    }
    [order, merged] = [merged, order];
    starts = starts.filter((_, run) => run % 2 === 0);
  }
  return order;
}
