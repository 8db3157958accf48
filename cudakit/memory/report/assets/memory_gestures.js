// The x axis of all views over time, in events, and the gestures of the pointer in them.

import { ScreenAxis, addGestures } from "./gestures.js";

/** The place of the x axis in a view: converts between pixels, positions on the axis and events. */
export class TimeScale extends ScreenAxis {
  constructor(app, left = 96, right = 8) {
    super(() => app.visibleRange(), left, right);
    this.app = app;
  }

  /** Return the x coordinate of an event. */
  x(event, width) {
    return this.xOf(this.app.axis.position(event), width);
  }

  /** Return the event whose state is drawn at an x coordinate. */
  event(x, width) {
    return this.app.axis.eventAt(this.position(x, width));
  }
}

/** Add gestures to a view over time; `onClick` gets the event at the pointer, and dragging selects a window of events. */
export function addTimeGestures(app, surface, scale, { onClick, onMove, selectsWindow }) {
  const eventAt = (x) => scale.event(x, surface.width);
  const select = (x1, x2) => {
    const ends = [eventAt(x1), eventAt(x2)];
    app.state.set({ brush: ends[0] < ends[1] ? ends : null });
  };
  addGestures(app, surface, scale, { onMove, onClick: (x, y) => onClick(eventAt(x), x, y), onSelect: selectsWindow ? select : null });
}
