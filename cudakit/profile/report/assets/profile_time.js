// Times and durations as text.

import { formatCount } from "./canvas.js";

const UNITS = [
  ["s", 1e9],
  ["ms", 1e6],
  ["us", 1e3],
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
