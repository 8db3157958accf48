// All devices of a report in one view: a row for each, with one scale of bytes, one x axis and one cursor.

import { Surface, Tooltip, fittedEnd, formatBytes, formatCount, formatMicroseconds, make, ticks } from "./canvas.js";
import { drawExplorers } from "./explorer.js";
import { PageState, choiceReader } from "./page_state.js";

// Heights of a row and of its curves, of the x axis, and width of the names and the margin, in pixels.
const ROW = 64;
const CURVES = 52;
const AXIS = 22;
const LEFT = 230;
const RIGHT = 10;
const AREA_COLOR = 4; // index of the color of the areas

class DevicesView {
  constructor(element, arrays, { devices }) {
    this.devices = devices.map((facts, i) => ({ ...facts, points: pointsOf(arrays, i) }));
    this.highest = Math.max(1, ...this.devices.flatMap(({ points }) => Array.from(points.reserved)));
    const timed = devices.every((device) => device.has_times);
    this.sharesClock = timed && overlap(devices);
    this.state = new PageState({ axis: timed ? "time" : "event" }, { axis: choiceReader(timed ? ["time", "event"] : ["event"]) }, "devices.");
    this.tooltip = new Tooltip();
    this.surface = new Surface(this.devices.length * ROW + AXIS, "Memory of all devices over time", (...parts) => this.#draw(...parts));
    const options = ["time", "event"].map((value) => make("option", { value, disabled: value === "time" && !timed }, value));
    this.choice = make("select", { onchange: () => this.state.set({ axis: this.choice.value }) }, ...options);
    this.caption = make("p", { class: "caption" });
    const hint = "click: set the cursor · click a name: go to the device";
    element.replaceChildren(
      make("div", { class: "toolbar" }, make("strong", {}, "All devices"), make("label", {}, "x axis ", this.choice), make("span", { class: "muted" }, hint)),
      this.surface.element,
      this.caption,
      this.tooltip.element,
    );
    this.#listen();
    this.#update();
  }

  #listen() {
    const { canvas } = this.surface;
    canvas.addEventListener("click", (event) => this.#click(event));
    canvas.addEventListener("pointermove", (event) => this.#hover(event));
    canvas.addEventListener("pointerleave", () => this.tooltip.hide());
    this.state.listen(() => this.#update());
    // The cursors of the devices are drawn again whenever one moves.
    const redrawWithState = ({ explorer }) => explorer.state.listen(() => this.surface.redraw());
    for (const views of this.#deviceViews()) if (views.explorer) redrawWithState(views);
    document.addEventListener("explorer-ready", ({ target }) => {
      if (target.dataset.kind !== "memory") return;
      redrawWithState(target);
      this.surface.redraw();
    });
  }

  /** Return the elements with the views of each device, in the order of the devices. */
  #deviceViews() {
    return document.querySelectorAll('.explorer[data-kind="memory"]');
  }

  #update() {
    const { axis } = this;
    this.choice.value = axis;
    const clock = this.sharesClock ? "The times are those of one clock" : "The traces are from different times, and each begins at 0";
    const time = `${clock}. A click sets the cursors of all devices to one time.`;
    this.caption.textContent = `Requested (area) and reserved memory (line). ${axis === "time" ? time : "A click sets the cursor of one device."}`;
    this.surface.redraw();
  }

  get axis() {
    return this.state.get("axis");
  }

  /** Return the position on the x axis at which a device's trace begins. */
  #offset(device) {
    const first = Math.min(...this.devices.map(({ first_us: us }) => us));
    return this.axis === "time" && this.sharesClock ? device.first_us - first : 0;
  }

  /** Return the position of the end of a device's trace, from its begin. */
  #length(device) {
    return this.axis === "time" ? device.last_us - device.first_us : device.events;
  }

  #draw(context, width, height, colors) {
    this.end = Math.max(1, ...this.devices.map((device) => this.#offset(device) + this.#length(device)));
    this.perUnit = (width - LEFT - RIGHT) / this.end;
    this.devices.forEach((device, i) => this.#drawDevice(context, device, i, width, colors));
    context.fillStyle = colors.muted;
    context.textAlign = "center";
    context.textBaseline = "top";
    for (const value of ticks(0, this.end, Math.max(2, width / 160), 10)) {
      const text = this.axis === "time" ? `+${formatMicroseconds(value)}` : formatCount(value);
      context.fillText(text, Math.min(LEFT + value * this.perUnit, width - context.measureText(text).width / 2), this.devices.length * ROW + 6);
    }
  }

  #drawDevice(context, device, index, width, colors) {
    const bottom = index * ROW + CURVES + 6;
    const peak = device.points.requested.reduce((highest, value) => Math.max(highest, value), 0);
    context.textAlign = "left";
    context.textBaseline = "middle";
    context.fillStyle = colors.ink;
    // The end of a long path has the name of the file.
    context.fillText(fittedEnd(context, device.name, LEFT - 16), 4, bottom - 34);
    context.fillStyle = colors.muted;
    context.fillText(`peak ${formatBytes(peak)}, ${formatCount(device.events)} events`, 4, bottom - 16);
    context.fillStyle = colors.line;
    context.fillRect(LEFT, bottom, width - LEFT - RIGHT, 1);
    this.#drawCurves(context, device, bottom, colors);
    context.fillStyle = colors.error;
    for (const position of this.axis === "time" ? device.failure_times : device.failures) {
      context.fillRect(this.#x(device, position) - 1, bottom - CURVES, 2, CURVES);
    }
    const cursor = this.#cursor(index);
    context.fillStyle = colors.accent;
    if (cursor !== null) context.fillRect(this.#x(device, cursor) - 1, bottom - CURVES - 4, 2, CURVES + 8);
  }

  #drawCurves(context, device, bottom, colors) {
    const { requested, reserved } = device.points;
    const positions = device.points[this.axis];
    const height = (bytes) => (bytes / this.highest) * CURVES;
    const endX = (i) => this.#x(device, i + 1 < positions.length ? positions[i + 1] : this.#length(device));
    context.fillStyle = colors.bands[AREA_COLOR];
    for (let i = 0; i < positions.length; i++) {
      const x = this.#x(device, positions[i]);
      context.fillRect(x, bottom - height(requested[i]), Math.max(endX(i) - x, 1), height(requested[i]));
    }
    context.strokeStyle = colors.ink;
    context.lineWidth = 1;
    context.beginPath();
    for (let i = 0; i < positions.length; i++) {
      const y = bottom - height(reserved[i]);
      if (!i) context.moveTo(this.#x(device, positions[i]), y);
      context.lineTo(this.#x(device, positions[i]), y);
      context.lineTo(endX(i), y);
    }
    context.stroke();
  }

  #x(device, position) {
    return LEFT + (this.#offset(device) + position) * this.perUnit;
  }

  /** Return the position of the cursor in the trace of a device; null while its views are loading. */
  #cursor(index) {
    const { explorer } = this.#deviceViews()[index] || {};
    if (!explorer) return null;
    const event = Math.max(explorer.state.get("cursor"), 0);
    return this.axis === "time" ? explorer.model.arrays.time_us[event] : event;
  }

  /** Return the index of the device at a pointer, its position on the x axis, and whether it is on the device's name. */
  #at(event) {
    const [x, y] = this.surface.position(event);
    return { index: Math.min(Math.floor(y / ROW), this.devices.length - 1), position: (x - LEFT) / this.perUnit, onName: x < LEFT };
  }

  #click(event) {
    const { index, position, onName } = this.#at(event);
    const views = this.#deviceViews();
    if (onName) return views[index].scrollIntoView();
    if (this.axis === "event") {
      const last = this.devices[index].events - 1;
      views[index].explorer?.state.set({ cursor: Math.max(-1, Math.min(last, Math.floor(position))) });
      return;
    }
    this.devices.forEach((device, i) => views[i].explorer?.showTime(position - this.#offset(device)));
  }

  #hover(event) {
    const { index, position, onName } = this.#at(event);
    const device = this.devices[index];
    if (onName) return this.tooltip.show(event, [device.name]);
    const inTrace = Math.max(position - this.#offset(device), 0);
    const positions = device.points[this.axis];
    let point = 0;
    while (point + 1 < positions.length && positions[point + 1] <= inTrace) point++;
    const { requested, reserved } = device.points;
    const moment = this.axis === "time" ? `+${formatMicroseconds(inTrace)}` : `event ${formatCount(Math.floor(inTrace))}`;
    const memory = positions.length ? [`requested ${formatBytes(requested[point])} · reserved ${formatBytes(reserved[point])}`] : [];
    this.tooltip.show(event, [`${device.name}, ${moment}`, ...memory]);
  }
}

/** Return the curves of a device; item i is valid from its event and its time until those of item i + 1. */
function pointsOf(arrays, i) {
  return {
    event: arrays[`event${i}`].map((event) => event - 1),
    time: arrays[`time${i}`],
    requested: arrays[`requested${i}`],
    reserved: arrays[`reserved${i}`],
  };
}

/** Return whether all traces have a moment in common; then their times are drawn on one clock. */
function overlap(devices) {
  const traced = devices.filter((device) => device.events);
  return Math.max(...traced.map((device) => device.first_us)) <= Math.min(...traced.map((device) => device.last_us));
}

drawExplorers("memory_devices", (views, arrays, facts) => new DevicesView(views, arrays, facts));
