// A limit's slider, and the budget's line in the plot, which moves it: while one is dragged the plot answers here, and the
// server is asked once the slider rests.
(function () {
  const REST_MS = 150; // an assumption: longer than the pause between two steps of a drag, shorter than a wait
  const timers = {};
  const waiting = {}; // what a person chose and has not been sent yet
  const sent = {};
  const followed = {};
  const ends = {};
  let frame = 0;

  // The point that a limit picks of those that are drawn: the fastest within a budget, the leanest within a time.
  function picked(plot, dots, name, limit) {
    const within = name === "budget" ? (x) => x <= limit : (x, y) => y <= limit;
    let best = null;
    dots.forEach((place) => {
      const trace = plot.data[place];
      if (!trace || !trace.x) return;
      for (let i = 0; i < trace.x.length; i += 1) {
        const x = trace.x[i];
        const y = trace.y[i];
        if (!within(x, y)) continue;
        if (!best || (name === "budget" ? y < best.y : x < best.x)) best = { x, y };
      }
    });
    return best;
  }

  function show(name, limit, places, none) {
    const plot = document.querySelector("#graph .js-plotly-plot");
    if (!plot || !plot.data || !plot.layout || !plot.layout.shapes || !window.Plotly) return;
    // Over other units than memory and time the server alone knows what a limit picks.
    if (plot.layout.meta && !plot.layout.meta.usual) return;
    const axis = name === "budget" ? "x" : "y";
    const veil = "shapes[" + places[name] + "].";
    const other = "shapes[" + places[name === "budget" ? "target" : "budget"] + "].visible";
    const unit = plot.layout[axis + "axis"].title.text.split(", ").pop();
    const words = Number(limit.toPrecision(3)) + " " + unit;
    const layout = { [veil + "visible"]: !none, [other]: false };
    if (!none) layout[veil + axis + "0"] = limit;
    const drawn = name === "budget" && !none;
    const line = "shapes[" + places.line + "].";
    const label = "annotations[" + places.label + "].";
    layout[line + "visible"] = drawn;
    if (drawn) layout[line + "xanchor"] = limit;
    layout[label + "text"] = drawn ? words : places.free;
    layout[label + "xref"] = drawn ? "x" : "paper";
    layout[label + "x"] = !drawn ? 1 : plot.layout.xaxis.type === "log" ? Math.log10(limit) : limit;
    layout[label + "xanchor"] = drawn ? "center" : "right";
    const best = none ? null : picked(plot, places.dots, name, limit);
    const data = best ? { x: [[best.x]], y: [[best.y]] } : {};
    window.Plotly.update(plot, data, layout, [places.selected]);
    const text = document.getElementById(name + "-text");
    // Shown only: the field's own value follows with the server's answer.
    if (text && document.activeElement !== text) text.value = none ? "" : words;
  }

  function slide(name, value, filled, places, max, step) {
    ends[name] = { max, step };
    const same = value === (filled || {})[name + ".value"];
    const answer = same && filled !== followed[name];
    followed[name] = filled;
    if (answer) {
      // The server's, to what came before: sent back, it would be answered in its turn, without end.
      if (!(name in waiting)) sent[name] = value;
      else if (waiting[name] !== value) window.dash_clientside.set_props(name, { value: waiting[name] });
      return;
    }
    window.clearTimeout(timers[name]);
    delete waiting[name];
    if (same && (sent[name] === undefined || sent[name] === value)) return;
    window.cancelAnimationFrame(frame);
    if (!same) frame = window.requestAnimationFrame(() => show(name, value, places, value >= max - step));
    waiting[name] = value;
    timers[name] = window.setTimeout(() => {
      delete waiting[name];
      sent[name] = value;
      window.dash_clientside.set_props(name + "-rest", { data: value });
    }, REST_MS);
  }

  // The slider follows a finger or a mouse on the budget's line or words, which Plotly draws anew at every move.
  const GRIP = "#graph .annotation[data-index='1'], #graph .shapelayer path[data-index='4']";
  document.addEventListener("pointerdown", (event) => {
    const plot = event.target.closest(GRIP) && event.target.closest(".js-plotly-plot");
    if (!plot || !plot.layout.meta.usual || event.button) return;
    event.preventDefault();
    const place = document.getElementById("plot");
    let moved = 0;
    const move = (now) => {
      const axis = plot._fullLayout.xaxis;
      const at = axis.p2d(now.clientX - plot.getBoundingClientRect().left - axis._offset);
      const { max, step } = ends.budget;
      const value = Math.min(Math.max(Math.round(at / step) * step, step), max);
      window.cancelAnimationFrame(moved); // once for each picture
      moved = window.requestAnimationFrame(() => window.dash_clientside.set_props("budget", { value }));
    };
    const over = () => {
      place.removeEventListener("pointermove", move);
      place.classList.remove("dragging");
    };
    place.setPointerCapture(event.pointerId);
    place.classList.add("dragging");
    place.addEventListener("pointermove", move);
    ["pointerup", "pointercancel"].forEach((end) => place.addEventListener(end, over, { once: true }));
  }, true);

  window.dash_clientside = window.dash_clientside || {};
  window.dash_clientside.limits = {
    budget: (value, filled, places, max, step) => slide("budget", value, filled, places, max, step),
    target: (value, filled, places, max, step) => slide("target", value, filled, places, max, step),
  };
})();
