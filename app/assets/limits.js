// A limit's slider: while it is dragged the plot answers here, and the server is asked once the slider rests.
(function () {
  const REST_MS = 150; // an assumption: longer than the pause between two steps of a drag, shorter than a wait
  const timers = {};
  const sent = {};
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
    const layout = { [veil + "visible"]: !none, [other]: false };
    if (!none) layout[veil + axis + "0"] = limit;
    const best = none ? null : picked(plot, places.dots, name, limit);
    const data = best ? { x: [[best.x]], y: [[best.y]] } : {};
    window.Plotly.update(plot, data, layout, [places.selected]);
    const text = document.getElementById(name + "-text");
    const unit = plot.layout[axis + "axis"].title.text.split(", ").pop();
    // Shown only: the field's own value follows with the server's answer.
    if (text && document.activeElement !== text) text.value = none ? "" : Number(limit.toPrecision(3)) + " " + unit;
  }

  function slide(name, value, filled, places, max, step) {
    const same = value === (filled || {})[name + ".value"];
    window.clearTimeout(timers[name]);
    if (same && (sent[name] === undefined || sent[name] === value)) return;
    window.cancelAnimationFrame(frame);
    if (!same) frame = window.requestAnimationFrame(() => show(name, value, places, value >= max - step));
    timers[name] = window.setTimeout(() => {
      sent[name] = value;
      window.dash_clientside.set_props(name + "-rest", { data: value });
    }, REST_MS);
  }

  window.dash_clientside = window.dash_clientside || {};
  window.dash_clientside.limits = {
    budget: (value, filled, places, max, step) => slide("budget", value, filled, places, max, step),
    target: (value, filled, places, max, step) => slide("target", value, filled, places, max, step),
  };
})();
