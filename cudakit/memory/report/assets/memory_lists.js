// Lists: the groups that hold memory at the cursor, the events, and the details of the picked allocation.

import { VirtualList, formatBytes, formatCount, formatMicroseconds, formatSeconds, formatShare, make } from "./canvas.js";

const ROW = 24; // height of a row in pixels
const MOST_DISTINCT = 60; // number of groups whose names are made distinct
const COLUMNS = [
  ["bytes", "bytes"],
  ["share", "share"],
  ["blocks", "blocks"],
  ["change", "change in window"],
  ["name", "name"],
];

// The columns of the list of events: the class of the style sheet with the width, and the heading.
const EVENT_COLUMNS = [
  ["blocks", "event"],
  ["time", "time"],
  ["action", "action"],
  ["bytes", "requested"],
  ["name", "call site"],
];

/** The groups that hold memory at the cursor, sortable by each column. */
export class HoldersView {
  constructor(app) {
    this.app = app;
    this.sort = { column: "bytes", down: true };
    this.list = new VirtualList(396, ROW, (index) => this.#row(this.rows[index]));
    this.headings = COLUMNS.map(([column, text]) => make("button", { type: "button", class: column, onclick: () => this.#sortBy(column) }, text));
    this.emptyText = make("p", { class: "muted", hidden: true }, "No memory in use at the cursor matches the filter.");
    this.element = make("div", { class: "holders" }, make("div", { class: "list-row list-head" }, ...this.headings), this.emptyText, this.list.element);
  }

  redraw(changed) {
    if (changed && this.rows && !["cursor", "brush", "filter", "by", "group"].some((name) => changed.has(name))) return;
    const { model, state, mask } = this.app;
    const grouping = this.app.grouping;
    const groups = model.groupsAt(state.get("cursor"), grouping, mask);
    const total = groups.reduce((sum, group) => sum + group.bytes, 0);
    const bytesBefore = new Map();
    const brush = state.get("brush");
    if (brush) for (const group of model.groupsAt(brush[0], grouping, mask)) bytesBefore.set(group.id, group.bytes);
    this.element.classList.toggle("with-window", brush !== null);
    const bytesAfter = brush ? new Map(model.groupsAt(brush[1], grouping, mask).map((group) => [group.id, group.bytes])) : bytesBefore;
    // Only the largest groups get distinct names, because this compares all pairs.
    const distinct = grouping.names ? grouping.names(groups.slice(0, MOST_DISTINCT).map((group) => group.id)) : [];
    this.rows = groups.map((group, i) => ({
      ...group,
      share: total ? group.bytes / total : 0,
      change: brush ? (bytesAfter.get(group.id) || 0) - (bytesBefore.get(group.id) || 0) : null,
      name: distinct[i] ?? grouping.name(group.id),
    }));
    const { column, down } = this.sort;
    const sign = down ? -1 : 1;
    this.rows.sort((a, b) => sign * (a[column] < b[column] ? -1 : a[column] > b[column] ? 1 : 0));
    COLUMNS.forEach(([name, text], i) => (this.headings[i].textContent = name === column ? `${text} ${down ? "▾" : "▴"}` : text));
    this.emptyText.hidden = this.rows.length > 0;
    this.list.setLength(this.rows.length);
  }

  #sortBy(column) {
    this.sort = { column, down: this.sort.column === column ? !this.sort.down : column !== "name" };
    this.redraw();
  }

  #row({ id, bytes, share, blocks, change, name }) {
    const picked = this.app.state.get("group") === id;
    return make(
      "div",
      { class: `list-row${picked ? " picked" : ""}`, onclick: () => this.app.pickGroup(picked ? -1 : id), title: name },
      make("span", { class: "bytes" }, formatBytes(bytes)),
      make("span", { class: "share" }, formatShare(share)),
      make("span", { class: "blocks" }, formatCount(blocks)),
      make("span", { class: "change" }, change === null ? "" : `${change > 0 ? "+" : ""}${formatBytes(change)}`),
      make("span", { class: "name" }, this.app.swatch(id), name),
    );
  }
}

/** The list of events: all events, or those that the filter, the picked group and the window select. */
export class EventsView {
  constructor(app) {
    this.app = app;
    this.list = new VirtualList(396, ROW, (index) => this.#row(this.shownEvents ? this.shownEvents[index] : index));
    this.title = make("span", { class: "muted" });
    const headings = EVENT_COLUMNS.map(([style, text]) => make("span", { class: `muted ${style}` }, text));
    this.element = make("div", { class: "events" }, make("div", { class: "view-bar" }, this.title), make("div", { class: "list-row list-head" }, ...headings), this.list.element);
  }

  redraw(changed) {
    const { app } = this;
    const selectionChanged = !changed || !this.isDrawn || ["filter", "group", "by", "brush"].some((name) => changed.has(name));
    if (selectionChanged) this.#select();
    else if (!changed.has("cursor")) return;
    this.isDrawn = true;
    const cursor = app.state.get("cursor");
    this.list.scrollTo(Math.max(0, this.shownEvents ? firstAtLeast(this.shownEvents, cursor) : cursor));
  }

  /** Set the events to show; null means all events. */
  #select() {
    const { model, state, mask, grouping } = this.app;
    const [first, last] = state.get("brush") || [0, model.events - 1];
    const group = state.get("group");
    const showsAll = !mask && group < 0 && !state.get("brush");
    this.shownEvents = null;
    if (!showsAll) {
      const events = [];
      for (let event = Math.max(first, 0); event <= last; event++) {
        const i = model.eventAllocation[event];
        if ((mask || group >= 0) && i < 0) continue;
        if (mask && !mask[model.arrays.stack[i]]) continue;
        if (group >= 0 && grouping.ids[i] !== group) continue;
        events.push(event);
      }
      this.shownEvents = events;
    }
    const count = this.shownEvents ? this.shownEvents.length : model.events;
    this.title.textContent = `${formatCount(count)} of ${formatCount(model.events)} events${showsAll ? "" : ": those that match the filter, the selected group and the selected window"}`;
    this.list.setLength(count);
  }

  #row(event) {
    const { app } = this;
    const { model } = app;
    const i = model.eventAllocation[event];
    const name = model.facts.actions[model.arrays.action[event]] || "";
    return make(
      "div",
      {
        class: `list-row${event === app.state.get("cursor") ? " picked" : ""}`,
        onclick: () => app.pick(i, event),
      },
      make("span", { class: "blocks" }, formatCount(event)),
      make("span", { class: "time" }, model.facts.has_times ? `+${formatSeconds(model.arrays.time_us[event])}` : ""),
      make("span", { class: "action" }, name.replaceAll("_", " ")),
      make("span", { class: "bytes" }, i < 0 ? "" : formatBytes(model.requested[i])),
      make("span", { class: "name" }, i < 0 ? "" : model.stackText(model.arrays.stack[i])),
    );
  }
}

/** Return the index of the first item of a sorted array that is at least a value. */
function firstAtLeast(sorted, value) {
  let low = 0;
  let high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < value) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** The totals at the cursor, and the picked allocation with its call stack. */
export class DetailsView {
  constructor(app) {
    this.app = app;
    this.element = make("aside", { class: "details", "aria-label": "Details" });
  }

  redraw() {
    const { model, state } = this.app;
    const cursor = state.get("cursor");
    const totals = model.totalsAt(cursor);
    const rows = Object.entries(totals).map(([name, value]) => [name === "active" ? "in use" : name, name === "blocks" ? formatCount(value) : formatBytes(value)]);
    const free = model.free.at(cursor);
    if (free) {
      rows.push(["free in segments", formatBytes(free.free)], ["largest free block", formatBytes(free.largest)], ["fragmentation", formatShare(free.fragmentation)]);
    }
    const time = this.app.clockTime(cursor);
    if (time) rows.push(["time", time]);
    const parts = [make("h3", {}, this.app.eventLabel(cursor)), factList(rows)];
    const picked = state.get("allocation");
    if (picked >= 0) parts.push(...this.#allocation(picked));
    else parts.push(make("p", { class: "muted" }, "Click an allocation or an event to see its call stack and its lifetime."));
    this.element.replaceChildren(...parts);
  }

  #allocation(i) {
    const { model } = this.app;
    const { arrays, facts } = model;
    const time = (event) => (facts.has_times && event >= 0 && event < model.events ? arrays.time_us[event] : null);
    const [begin, end] = [time(model.begin[i]), time(model.end[i])];
    const rows = [
      ["requested", formatBytes(model.requested[i])],
      ["block", formatBytes(model.size[i])],
      ["address", `0x${model.address[i].toString(16)}`],
      ["allocated", model.begin[i] < 0 ? "before the trace" : this.app.eventLabel(model.begin[i])],
      ["freed", model.end[i] >= model.events ? "never, in this trace" : this.app.eventLabel(model.end[i])],
      ["lifetime", begin === null || end === null ? `${formatCount(Math.min(model.end[i], model.events) - model.begin[i])} events` : formatMicroseconds(end - begin)],
      ["stream", arrays.stream[i] ? String(arrays.stream[i]) : "default"],
      ["pool", facts.pools[arrays.pool[i]] || "default"],
    ];
    if (arrays.range[i]) rows.push(["annotation", facts.range_names[arrays.range[i]]]);
    const frames = model.stackFrames(arrays.stack[i]);
    const list = frames.length ? make("ol", {}, ...frames.map((frame) => make("li", {}, frame))) : make("p", { class: "muted" }, "no call stack recorded");
    return [make("h3", {}, "Selected allocation"), factList(rows), list];
  }
}

function factList(rows) {
  return make("dl", {}, ...rows.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]));
}
