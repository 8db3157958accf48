// Time: durations as text, the axis of the timeline, and the gestures of the pointer.

import { formatCount } from "./canvas.js";

const UNITS = [
  ["s", 1e9],
  ["ms", 1e6],
  ["µs", 1e3],
  ["ns", 1],
];

/** Return nanoseconds as text with three significant digits: "3.22 ms". */
export function formatNanoseconds(ns) {
  const [unit, size] = UNITS.find(([, size]) => Math.abs(ns) >= size * 0.9995) || UNITS[3];
  if (size === 1) return `${Math.round(ns)} ns`;
  const value = ns / size;
  const digits = Math.abs(value) >= 99.95 ? 0 : Math.abs(value) >= 9.995 ? 1 : 2;
  return `${value.toFixed(digits)} ${unit}`;
}

/** Return a time after the first activity as text with microseconds: "1,204.061 ms". */
export function formatTime(ns) {
  const microseconds = String(Math.floor((ns % 1e6) / 1e3)).padStart(3, "0");
  return `${formatCount(Math.floor(ns / 1e6))}.${microseconds} ms`;
}

/** Return the label of a tick of the axis; `step` is the distance between ticks, in ns. */
export function tickText(time, step) {
  const [unit, size] = UNITS.find(([, size]) => Math.max(time, step) >= size) || UNITS[3];
  const digits = Math.max(0, Math.ceil(-Math.log10(step / size) - 1e-9));
  return `${(time / size).toFixed(digits)} ${unit}`;
}

/** The place of the time axis in a view: converts between pixels and nanoseconds. */
export class TimeAxis {
  constructor(state, left, right) {
    Object.assign(this, { state, left, right });
  }

  x(time, width) {
    const [first, last] = this.state.get("view");
    return this.left + ((time - first) / (last - first)) * (width - this.left - this.right);
  }

  time(x, width) {
    const [first, last] = this.state.get("view");
    return first + ((x - this.left) / (width - this.left - this.right)) * (last - first);
  }
}

/** Add gestures to the timeline: the wheel zooms, dragging selects a window, or moves with shift; a click picks. */
export function addGestures(app, surface, axis, { onClick, onMove }) {
  const { canvas } = surface;
  const clamped = (time) => Math.max(0, Math.min(app.model.duration, Math.round(time)));
  canvas.addEventListener(
    "wheel",
    (event) => {
      if (event.altKey) return; // with alt, the wheel scrolls the page
      event.preventDefault();
      const [x] = surface.position(event);
      if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) app.pan(((event.deltaX || event.deltaY) / surface.width) * 0.5);
      else app.zoom(axis.time(x, surface.width), Math.exp(event.deltaY * 0.0015));
    },
    { passive: false },
  );
  let drag = null;
  canvas.addEventListener("pointerdown", (event) => {
    const [x] = surface.position(event);
    drag = { x, view: app.state.get("view"), hasMoved: false, selects: !event.shiftKey };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    const [x, y] = surface.position(event);
    if (!drag) return onMove(event, x, y);
    if (Math.abs(x - drag.x) < 4 && !drag.hasMoved) return;
    drag.hasMoved = true;
    app.tooltip.hide();
    if (drag.selects) {
      const ends = [axis.time(drag.x, surface.width), axis.time(x, surface.width)].sort((a, b) => a - b).map(clamped);
      app.state.set({ window: ends[0] < ends[1] ? ends : null });
    } else {
      const [first, last] = drag.view;
      app.show(first + ((drag.x - x) / (surface.width - axis.left - axis.right)) * (last - first), last - first);
    }
  });
  canvas.addEventListener("pointerup", (event) => {
    const [x, y] = surface.position(event);
    if (drag && !drag.hasMoved) onClick(x, y);
    drag = null;
  });
  canvas.addEventListener("pointercancel", () => (drag = null));
  canvas.addEventListener("pointerleave", () => app.tooltip.hide());
  canvas.addEventListener("dblclick", () => app.showAll());
}
