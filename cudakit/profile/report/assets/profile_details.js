// The details beside the timeline: the sums of the selected window, and the picked work or API call.

import { formatBytes, formatCount, formatShare, make } from "./canvas.js";
import { formatNanoseconds, formatTime } from "./profile_time.js";
import { causeBand } from "./profile_timeline.js";

export class DetailsView {
  constructor(app) {
    this.app = app;
    this.element = make("aside", { class: "details", "aria-label": "Details" });
  }

  redraw(changed) {
    if (changed && !["window", "pick"].some((name) => changed.has(name))) return;
    const picked = this.app.picked();
    const parts = this.#window();
    if (!picked) parts.push(make("p", { class: "muted" }, "Click a kernel or an API call to see its launch configuration and its call stack."));
    else if (picked.source === "work") parts.push(...this.#work(picked.index));
    else parts.push(...this.#call(picked.index));
    this.element.replaceChildren(...parts);
  }

  #window() {
    const { model } = this.app;
    const [first, last] = this.app.window();
    const totals = model.totalsIn(first, last);
    const rows = [
      ["length", formatNanoseconds(last - first)],
      ["GPU operations", formatCount(totals.count)],
      ["GPU time", formatNanoseconds(totals.time)],
    ];
    for (const { number, name } of model.devices) {
      rows.push([`${name.replace(/ \(.*?\)/, "")} busy`, `${formatShare(totals.busy[number] / (last - first))}, ${formatNanoseconds(totals.busy[number])}`]);
    }
    const idle = model.facts.causes
      .map((cause, number) => [cause, totals.idle[number], number])
      .filter(([, time]) => time > 0)
      .sort((a, b) => b[1] - a[1])
      .map(([cause, time, number]) => [make("span", {}, make("span", { class: `swatch band${causeBand(number)}` }), cause), formatNanoseconds(time)]);
    const isWindow = this.app.state.get("window") !== null;
    const parts = [make("h3", {}, isWindow ? "Selected window" : "Whole recording"), factList(rows)];
    const [measuredFirst, measuredLast] = model.facts.measured_ns || [0, model.duration];
    if (!isWindow && (measuredFirst > 0 || measuredLast < model.duration)) {
      const text = "The whole recording includes time before and after the measured steps. The text above the timeline is about the measured steps only.";
      parts.push(make("p", { class: "muted" }, text));
    }
    if (idle.length) parts.push(make("h3", {}, model.devices.length > 1 ? "Idle time by cause, all GPUs" : "Idle time by cause"), factList(idle));
    return parts;
  }

  #work(i) {
    const { model } = this.app;
    const { work } = model;
    const launch = model.launchOfWork(i);
    const call = work.call[i];
    const rows = [
      ["duration", formatNanoseconds(work.duration[i])],
      ["start", formatTime(work.start[i])],
      ["stream", String(model.streamOfWork(i))],
    ];
    if (launch) {
      const threads = launch.block.reduce((product, size) => product * size, 1);
      rows.push(["grid", launch.grid.join(" × ")], ["block", `${launch.block.join(" × ")} (${formatCount(threads)} threads)`]);
      rows.push(["registers", `${launch.registers} per thread`], ["shared memory", `${formatBytes(launch.shared)} per block`]);
    } else {
      rows.push(["size", formatBytes(work.size[i])]);
      if (work.duration[i]) rows.push(["throughput", `${(work.size[i] / work.duration[i]).toPrecision(3)} GB/s`]);
    }
    if (work.inGraph[i]) rows.push(["launched by", "a CUDA graph"]);
    if (call >= 0) {
      rows.push(["API call", model.nameOfCall(call)], ["delay", `${formatNanoseconds(work.start[i] - model.calls.end[call])} after the call`]);
    }
    return [make("h3", {}, model.facts.kinds[work.kind[i]]), make("p", { class: "name" }, model.nameOfWork(i)), factList(rows), stackList(model.stackOfWork(i))];
  }

  #call(i) {
    const { model } = this.app;
    const started = model.workOfCall[i];
    const rows = [
      ["duration", formatNanoseconds(model.calls.duration[i])],
      ["start", formatTime(model.calls.start[i])],
    ];
    if (started >= 0) rows.push(["started", model.nameOfWork(started)]);
    return [make("h3", {}, model.nameOfCall(i)), factList(rows), stackList(model.stackOfCall(i))];
  }
}

function factList(rows) {
  return make("dl", {}, ...rows.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]));
}

function stackList(frames) {
  return frames.length ? make("ol", {}, ...frames.map((frame) => make("li", {}, frame))) : make("p", { class: "muted" }, "no call stack recorded");
}
