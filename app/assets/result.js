// The plot of the page Result: a click and the arrow keys choose a point, and the budget's line is dragged. What is seen
// moves here at once; the address is written, which the server follows.
(function () {
  const DOTS = 1, SELECTED = 3; // places of traces
  const VEIL = 0, GRIP = 2, BUDGET = 0; // places of shapes and annotations (figures/frontier.py)
  const SAME = () => window.dash_clientside.no_update;

  const plotted = () => {
    const plot = document.querySelector("#graph .js-plotly-plot");
    return plot && plot._fullLayout && plot.layout.meta ? plot : null;
  };

  function choose(row, x, y) {
    const plot = plotted();
    if (plot && x !== undefined) window.Plotly.restyle(plot, { x: [[x]], y: [[y]] }, [SELECTED]);
    window.tensoropt.go(window.tensoropt.changed({ point: String(row + 1), time: "" }));
  }

  window.dash_clientside = window.dash_clientside || {};
  window.dash_clientside.result = {
    clicked: function (click) {
      const hit = ((click && click.points) || []).find((point) => Array.isArray(point.customdata));
      if (hit && plotted()) choose(hit.customdata[0], hit.x, hit.y);
      return SAME();
    },
    row: function (selected) {
      if (selected && selected.length) choose(Number(selected[0].id));
      return SAME();
    },
  };

  const STEPS = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1 };
  document.addEventListener("keydown", (event) => {
    const plot = plotted();
    const at = document.activeElement;
    const ends = { Home: 0, End: Infinity };
    if (document.documentElement.dataset.page !== "result" || event.ctrlKey || event.metaKey || event.altKey) return;
    if (!plot || (at && at !== document.body && !at.matches("#content, #plot, nav a"))) return;
    if (STEPS[event.key] === undefined && ends[event.key] === undefined) return;
    event.preventDefault();
    const dots = plot.data[DOTS], own = plot.data[SELECTED].x[0];
    const order = dots.x.map((x, i) => i).sort((a, b) => dots.x[a] - dots.x[b]);
    if (!order.length) return;
    let place = order.findIndex((i) => dots.x[i] >= own - 1e-9);
    if (place < 0) place = order.length;
    const exact = place < order.length && Math.abs(dots.x[order[place]] - own) < 1e-9;
    const step = STEPS[event.key];
    let next = step === undefined ? ends[event.key] : place + (step > 0 && !exact ? 0 : step);
    next = order[Math.min(Math.max(next, 0), order.length - 1)];
    choose(dots.customdata[next][0], dots.x[next], dots.y[next]);
  });

  // A launcher's config is priced first, which takes up to minutes.
  document.addEventListener("click", (event) => {
    const button = event.target.closest && event.target.closest(".launcher button[id*='launcher']");
    if (!button) return;
    const told = JSON.parse(button.id).launcher;
    window.dash_clientside.set_props({ told }, { children: "pricing it, seconds to two minutes …" });
  });

  // A finger or a mouse on the budget's line or words, which Plotly draws anew at every move.
  const HELD = "#graph .annotation[data-index='" + BUDGET + "'], #graph .shapelayer path[data-index='" + GRIP + "']";
  document.addEventListener("pointerdown", (event) => {
    const plot = event.target.closest && event.target.closest(HELD) && plotted();
    if (!plot || event.button) return;
    event.preventDefault();
    event.stopPropagation();
    const place = document.getElementById("plot");
    const field = document.getElementById("budget");
    const { unit, most } = plot.layout.meta;
    let limit = null, frame = 0;
    const move = (now) => {
      const axis = plot._fullLayout.xaxis;
      const at = axis.p2d(now.clientX - plot.getBoundingClientRect().left - axis._offset);
      const [low, high] = axis.range;
      const step = 10 ** Math.floor(Math.log10((high - low) / 100)); // a round figure for each pixel or two
      limit = Math.min(Math.max(Math.round(at / step) * step, Math.max(low, step)), most);
      const words = Number(limit.toPrecision(6)) + " " + unit;
      window.cancelAnimationFrame(frame); // once for each picture
      frame = window.requestAnimationFrame(() => window.Plotly.relayout(plot, {
        ["shapes[" + VEIL + "].x0"]: limit,
        ["shapes[" + GRIP + "].xanchor"]: limit,
        ["annotations[" + BUDGET + "].x"]: limit,
        ["annotations[" + BUDGET + "].xref"]: "x",
        ["annotations[" + BUDGET + "].xanchor"]: "center",
        ["annotations[" + BUDGET + "].text"]: words,
      }));
      if (field) field.value = words; // shown only: its own value follows with the server's answer
    };
    const over = () => {
      place.removeEventListener("pointermove", move);
      place.classList.remove("dragging");
      if (limit === null) return;
      window.tensoropt.go(window.tensoropt.changed({ budget: Number(limit.toPrecision(6)) + unit, point: "", time: "" }));
    };
    place.setPointerCapture(event.pointerId);
    place.classList.add("dragging");
    place.addEventListener("pointermove", move);
    ["pointerup", "pointercancel"].forEach((end) => place.addEventListener(end, over, { once: true }));
  }, true);
})();
