// The x axis of all views over time: it counts events, or it shows the times of the events.

import { formatCount } from "./canvas.js";

export const AXIS_KINDS = { event: "event", time: "time" };

const SHORTEST_RANGE = 8; // smallest visible range: events, or microseconds
// Share of the duration that the time axis shows before the first event and after the last one, so that the
// states before and after the trace are visible.
const TIME_MARGIN = 0.01;

/** The position of each event on an axis: its index, or its time in microseconds after the first event. */
export class Axis {
  constructor(model, kind) {
    this.kind = kind;
    this.events = model.events;
    // Item e + 1 is the position of event e; the last item is the end of the axis.
    this.positions = kind === "time" ? timePositions(model) : Float64Array.from({ length: model.events + 2 }, (_, i) => i - 1);
    this.first = this.positions[0];
    this.last = Math.max(this.positions.at(-1), this.first + 1);
  }

  position(event) {
    return this.positions[event + 1];
  }

  /** Return the last event at or before a position; -1 is the state before the first event. */
  eventAt(position) {
    return Math.min(Math.max(countBelow(this.positions, position, true) - 2, -1), this.events - 1);
  }

  /**
   * Divide a range into equal columns. Return the events whose states each column shows: from the last event at or
   * before the column's left edge to the last event before its right edge.
   */
  columns(first, last, count) {
    const [from, to] = [new Int32Array(count), new Int32Array(count)];
    const perColumn = (last - first) / count;
    for (let column = 0; column < count; column++) {
      from[column] = this.eventAt(first + perColumn * column);
      const before = countBelow(this.positions, first + perColumn * (column + 1), false) - 2;
      to[column] = Math.max(from[column], Math.min(before, this.events - 1));
    }
    return { from, to };
  }

  /** Return a range of a length from a position, limited to the axis, as whole numbers. */
  rangeFrom(first, length) {
    const visible = Math.min(Math.max(SHORTEST_RANGE, Math.round(length)), this.last - this.first);
    const from = Math.max(this.first, Math.min(Math.round(first), this.last - visible));
    return [from, from + visible];
  }

  /** Return the label of a tick; `step` is the distance between ticks. */
  tickText(value, step) {
    if (this.kind !== "time") return Number.isInteger(value) ? formatCount(value) : "";
    if (value < 0) return "";
    const [unit, size] = value + step >= 1e6 ? ["s", 1e6] : value + step >= 1e3 ? ["ms", 1e3] : ["us", 1];
    const digits = Math.max(0, Math.ceil(-Math.log10(step / size) - 1e-9));
    return `+${(value / size).toFixed(digits)} ${unit}`;
  }
}

function timePositions({ events, arrays }) {
  const positions = new Float64Array(events + 2);
  positions.set(arrays.time_us, 1);
  const duration = events ? arrays.time_us[events - 1] : 0;
  const margin = Math.max(1, Math.round(duration * TIME_MARGIN));
  positions[0] = -margin;
  positions[events + 1] = duration + margin;
  return positions;
}

/** Return how many items of a sorted array are below a limit, or equal to it if `inclusive`. */
function countBelow(sorted, limit, inclusive) {
  let low = 0;
  let high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < limit || (inclusive && sorted[middle] === limit)) low = middle + 1;
    else high = middle;
  }
  return low;
}
