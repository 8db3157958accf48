// The memory page: loads the data, and lets all views share one cursor, one selection and one filter.

import { BAND_COLORS, Tooltip, formatBytes, formatCount, formatSeconds, make } from "./canvas.js";
import { drawExplorers } from "./explorer.js";
import { AXIS_KINDS, Axis } from "./memory_axis.js";
import { Bands } from "./memory_bands.js";
import { FLAME_KINDS, FlameView } from "./memory_flame.js";
import { LayoutView } from "./memory_layout.js";
import { DetailsView, EventsView, HoldersView } from "./memory_lists.js";
import { MapView } from "./memory_map.js";
import { MemoryModel } from "./memory_model.js";
import { TimeView } from "./memory_time.js";
import { PageState, choiceReader, numberReader, rangeReader } from "./page_state.js";

const GROUPINGS = { stack: "call stack", line: "line of code", category: "category", range: "annotation", pool: "pool", stream: "stream" };
const MOST_FRAMES = 10; // number of frames in a tooltip
const TABS = { map: "Address map", layout: "Segments", flame: "Flame graph", holders: "Memory by group", events: "Events" };

class MemoryExplorer {
  constructor(model, element, prefix) {
    this.model = model;
    this.tooltip = new Tooltip();
    this.axes = {};
    this.state = new PageState(
      // A view of null shows the whole axis; else it is a range in the unit of the axis.
      { cursor: model.facts.shown_event, axis: "event", view: null, brush: null, by: "stack", tab: "map", group: -1, allocation: -1, filter: "", flame: "cursor" },
      {
        cursor: numberReader(-1, model.events - 1),
        axis: choiceReader(model.facts.has_times ? Object.keys(AXIS_KINDS) : ["event"]),
        view: rangeReader(-(2 ** 52), 2 ** 52),
        brush: rangeReader(-1, model.events - 1),
        by: choiceReader(Object.keys(GROUPINGS)),
        tab: choiceReader(Object.keys(TABS)),
        group: numberReader(-1, 2 ** 31),
        allocation: numberReader(-1, model.count - 1),
        filter: (text) => text.slice(0, 200),
        flame: choiceReader(Object.keys(FLAME_KINDS)),
      },
      prefix,
    );
    this.#updateGroups();
    this.time = new TimeView(this);
    this.views = { map: new MapView(this), layout: new LayoutView(this), flame: new FlameView(this), holders: new HoldersView(this), events: new EventsView(this) };
    this.details = new DetailsView(this);
    this.#build(element);
    this.state.listen((changed) => this.#update(changed));
    this.#update(null);
    model.free.ready.then((curves) => {
      this.time.showFreeMemory(curves);
      this.details.redraw();
    });
  }

  #build(element) {
    const options = (choices) => Object.entries(choices).map(([value, text]) => make("option", { value }, text));
    this.by = make("select", { onchange: () => this.state.set({ by: this.by.value, group: -1 }) }, ...options(GROUPINGS));
    this.axisChoice = make("select", { onchange: () => this.#switchAxis(this.axisChoice.value), disabled: !this.model.facts.has_times }, ...options(AXIS_KINDS));
    this.filter = make("input", { type: "search", placeholder: "function, file or line", oninput: () => this.state.set({ filter: this.filter.value.slice(0, 200), group: -1 }) });
    this.tabs = Object.entries(TABS).map(([tab, text]) =>
      make("button", { type: "button", role: "tab", id: `tab-${tab}`, onclick: () => this.state.set({ tab }) }, text),
    );
    this.legend = make("ul", { class: "legend" });
    this.body = make("div", { class: "view", role: "tabpanel" });
    element.replaceChildren(
      make(
        "div",
        { class: "toolbar" },
        make("label", {}, "color by ", this.by),
        make("label", {}, "only stacks with ", this.filter),
        make("label", {}, "x axis ", this.axisChoice),
        make("button", { type: "button", onclick: () => this.showAll() }, "show all events"),
        make("button", { type: "button", onclick: () => this.state.set({ cursor: this.model.facts.peak_event }) }, "go to the peak"),
        this.#failureButton(),
        make("span", { class: "muted" }, "wheel: zoom · drag: select a window · Shift and drag: move"),
      ),
      make(
        "div",
        { class: "panes" },
        make("div", {}, this.time.element, this.legend, make("div", { class: "tabs", role: "tablist" }, ...this.tabs), this.body),
        this.details.element,
      ),
      make("p", { class: "caption" }, this.#caption()),
      make("p", { class: "caption" }, "Keys: ← → move the cursor by an event, with Shift by more; + − zoom; 0 shows all events; Home and End go to the ends; Esc ends the selection and the filter."),
      this.tooltip.element,
    );
    element.addEventListener("keydown", (event) => this.#moveCursor(event));
  }

  /** Return a button that moves the cursor to the state before the last failed allocation; null if none failed. */
  #failureButton() {
    const failure = this.model.arrays.oom_event.at(-1);
    if (failure === undefined) return null;
    return make("button", { type: "button", onclick: () => this.state.set({ cursor: failure - 1 }) }, "go to the failure");
  }

  #caption() {
    const { device, events } = this.model.facts;
    const time = this.clockTime(0);
    const date = time ? `, recorded ${time.slice(0, 19)} UTC` : "";
    return `${device}, ${formatCount(events)} events${date}. Curves: reserved (solid), allocated (dashed), requested (dotted). Below them: the free share of the reserved memory (area), and external fragmentation, the share of this free memory outside the largest free block (line). In the address map and the segments, the gray that is not in the legend is free memory.`;
  }

  /** Return the date and time of an event in UTC; "" if the snapshot has no times. */
  clockTime(event) {
    const { first_us: first, has_times: timed } = this.model.facts;
    if (!timed || event < 0 || first <= 0 || first > 8e15) return "";
    return new Date((first + this.model.arrays.time_us[event]) / 1000).toISOString().replace("T", " ").replace("Z", " UTC");
  }

  get axis() {
    const kind = this.state.get("axis");
    return (this.axes[kind] ||= new Axis(this.model, kind));
  }

  /** Return the visible range of the x axis, in the unit of the axis. */
  visibleRange() {
    const { first, last } = this.axis;
    const [low, high] = this.state.get("view") || [first, last];
    return low < last && high > first ? [Math.max(low, first), Math.min(high, last)] : [first, last];
  }

  /** Change the unit of the x axis; the same events stay visible. */
  #switchAxis(kind) {
    const events = this.visibleRange().map((position) => this.axis.eventAt(position));
    const showsAll = this.state.get("view") === null;
    this.axisChoice.value = kind;
    const axis = (this.axes[kind] ||= new Axis(this.model, kind));
    const [first, last] = events.map((event) => axis.position(event));
    this.state.set({ axis: kind, view: showsAll ? null : axis.rangeFrom(first, last - first) });
  }

  /** Compute the groups and their bands after a change of the filter or the grouping. */
  #updateGroups() {
    this.mask = this.model.stacksWith(this.state.get("filter"));
    this.grouping = this.model.grouping(this.state.get("by"));
    this.bands = new Bands(this.model, this.grouping, this.mask, BAND_COLORS);
  }

  /** Draw the changed views now, instead of before the next frame. */
  redraw() {
    this.state.notify();
  }

  /** Redraw after changes of the state. `changed` has the names of changed values; null means all values. */
  #update(changed) {
    if (!changed || changed.has("filter") || changed.has("by")) {
      this.#updateGroups();
      this.by.value = this.state.get("by");
      if (this.filter.value !== this.state.get("filter")) this.filter.value = this.state.get("filter");
      this.legend.replaceChildren(...this.bands.names.map((name, band) => this.#legendItem(name, band)));
    }
    this.axisChoice.value = this.state.get("axis");
    const tab = this.state.get("tab");
    const view = this.views[tab];
    if (!changed || changed.has("tab")) {
      this.body.replaceChildren(view.element);
      for (const button of this.tabs) button.setAttribute("aria-selected", String(button.id === `tab-${tab}`));
      view.redraw(null);
    } else view.redraw(changed);
    this.time.redraw();
    if (!changed || changed.has("cursor") || changed.has("allocation")) this.details.redraw();
  }

  #legendItem(name, band) {
    const id = this.bands.ids[band];
    const swatch = make("span", { class: `swatch band${id === undefined ? "-rest" : band}` });
    if (id === undefined) return make("li", {}, swatch, name);
    const pick = () => this.pickGroup(this.state.get("group") === id ? -1 : id);
    return make("li", { title: name }, make("button", { type: "button", onclick: pick }, swatch, name));
  }

  #moveCursor(event) {
    if (event.target instanceof HTMLInputElement || event.target instanceof HTMLSelectElement) return;
    const cursor = this.state.get("cursor");
    const [first, last] = this.visibleRange().map((position) => this.axis.eventAt(position));
    const step = event.shiftKey ? Math.max(1, Math.round((last - first) / 50)) : 1;
    const moves = { ArrowLeft: -step, ArrowRight: step };
    if (event.key in moves) this.state.set({ cursor: Math.max(-1, Math.min(this.model.events - 1, cursor + moves[event.key])) });
    else if (event.key === "+" || event.key === "=") this.zoom(this.axis.position(cursor), 0.7);
    else if (event.key === "-") this.zoom(this.axis.position(cursor), 1.4);
    else if (event.key === "0") this.showAll();
    else if (event.key === "Home") this.state.set({ cursor: -1 });
    else if (event.key === "End") this.state.set({ cursor: this.model.events - 1 });
    else if (event.key === "Escape") this.state.set({ brush: null, group: -1, allocation: -1, filter: "" });
    else return;
    event.preventDefault();
  }

  /** Show a range of the x axis, limited to the axis; numbers are in the unit of the axis. */
  show(first, length) {
    const range = this.axis.rangeFrom(first, length);
    const isWhole = range[0] === this.axis.first && range[1] === this.axis.last;
    this.state.set({ view: isWhole ? null : range });
  }

  showAll() {
    this.state.set({ view: null });
  }

  /** Multiply the length of the visible range by a factor; the position `center` stays at the same pixel. */
  zoom(center, factor) {
    const [first, last] = this.visibleRange();
    const length = (last - first) * factor;
    this.show(center - (center - first) * factor, length);
  }

  /** Move the visible range by a share of its length. */
  pan(share) {
    const [first, last] = this.visibleRange();
    this.show(first + share * (last - first), last - first);
  }

  /** Set the cursor to the last event at or before a time, in microseconds after the first event. */
  showTime(us) {
    const axis = (this.axes.time ||= new Axis(this.model, "time"));
    this.state.set({ cursor: axis.eventAt(us) });
  }

  /** Pick an allocation, or none (-1), and set the cursor. */
  pick(allocation, cursor = this.state.get("cursor")) {
    this.state.set({ allocation, cursor });
  }

  pickGroup(group) {
    this.state.set({ group });
  }

  /** Return the band of the picked group, or null if no group is picked. */
  pickedBand() {
    const group = this.state.get("group");
    if (group < 0) return null;
    const band = this.bands.ids.indexOf(group);
    return band < 0 ? this.bands.ids.length : band;
  }

  swatch(id) {
    const band = this.bands.ids.indexOf(id);
    return make("span", { class: `swatch band${band < 0 ? "-rest" : band}` });
  }

  eventLabel(event) {
    if (event < 0) return "before the first event";
    const { facts, arrays } = this.model;
    const time = facts.has_times ? `, +${formatSeconds(arrays.time_us[event])}` : "";
    return `event ${formatCount(event)}${time}`;
  }

  /** Return lines that describe an allocation. */
  describe(i) {
    const { model } = this;
    const end = model.end[i] >= model.events ? "never freed" : `freed at event ${formatCount(model.end[i])}`;
    const begin = model.begin[i] < 0 ? "allocated before the trace" : `allocated at event ${formatCount(model.begin[i])}`;
    const frames = model.stackTexts(model.arrays.stack[i]);
    const more = frames.length > MOST_FRAMES ? [`… ${frames.length - MOST_FRAMES} more frames`] : [];
    return [`${formatBytes(model.requested[i])}, ${begin}, ${end}`, ...frames.slice(0, MOST_FRAMES), ...more];
  }
}

drawExplorers("memory", (views, arrays, facts, index) => {
  const model = new MemoryModel(arrays, facts);
  if (!model.events) throw new Error("the trace has no events");
  return new MemoryExplorer(model, views, index ? `${index + 1}.` : "");
});
