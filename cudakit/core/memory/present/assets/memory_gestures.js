// What all views over time share: the position of the axis on the screen, and the gestures of the pointer.

/** The place of the x axis in a view: converts between pixels, positions on the axis and events. */
export class TimeScale {
  constructor(app, left = 96, right = 8) {
    this.app = app;
    this.left = left;
    this.right = right;
  }

  /** Return the x coordinate of an event. */
  x(event, width) {
    return this.xOf(this.app.axis.position(event), width);
  }

  /** Return the x coordinate of a position on the axis. */
  xOf(position, width) {
    const [first, last] = this.app.visibleRange();
    return this.left + ((position - first) / (last - first)) * (width - this.left - this.right);
  }

  /** Return the position on the axis at an x coordinate. */
  position(x, width) {
    const [first, last] = this.app.visibleRange();
    return first + ((x - this.left) / (width - this.left - this.right)) * (last - first);
  }

  /** Return the event whose state is drawn at an x coordinate. */
  event(x, width) {
    return this.app.axis.eventAt(this.position(x, width));
  }

  /** Return whether an x coordinate is inside the plot. */
  contains(x, width) {
    return x >= this.left && x <= width - this.right;
  }
}

/** Add gestures to a view over time: the wheel zooms, dragging moves or selects a window, and a click sets the cursor. */
export function addTimeGestures(app, surface, scale, { onClick, onMove, selectsWindow }) {
  const { canvas } = surface;
  canvas.addEventListener(
    "wheel",
    (event) => {
      event.preventDefault();
      const [x] = surface.position(event);
      if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) app.pan((event.deltaX / surface.width) * 0.5);
      else app.zoom(scale.position(x, surface.width), Math.exp(event.deltaY * 0.0015));
    },
    { passive: false },
  );
  let drag = null;
  canvas.addEventListener("pointerdown", (event) => {
    const [x] = surface.position(event);
    drag = { x, range: app.visibleRange(), moved: false, selects: selectsWindow && !event.shiftKey };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    const [x, y] = surface.position(event);
    if (!drag) return onMove(event, x, y);
    if (Math.abs(x - drag.x) < 4 && !drag.moved) return;
    drag.moved = true;
    if (drag.selects) {
      const ends = [scale.event(drag.x, surface.width), scale.event(x, surface.width)].sort((a, b) => a - b);
      app.state.set({ brush: ends[0] < ends[1] ? ends : null });
    } else {
      const [first, last] = drag.range;
      app.show(first + ((drag.x - x) / surface.width) * (last - first), last - first);
    }
  });
  canvas.addEventListener("pointerup", (event) => {
    const [x, y] = surface.position(event);
    if (drag && !drag.moved) onClick(scale.event(x, surface.width), x, y);
    drag = null;
  });
  canvas.addEventListener("pointerleave", () => app.tooltip.hide());
  canvas.addEventListener("dblclick", () => app.showAll());
}
