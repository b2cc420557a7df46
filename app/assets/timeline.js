// The timeline and the memory curve of the plan page: names on bars, search, zoom and pan by keys, the way to an
// operator.
(function () {
  window.dash_clientside = window.dash_clientside || {};
  const SAME = () => window.dash_clientside.no_update;
  const NAMES = ["plan-timeline", "plan-curve"];
  const plotOf = (name) => document.querySelector(`#${name} .js-plotly-plot`);
  const ZOOM = 1.5; // of one press
  const PAN = 0.15; // of what is shown
  const PALE = 0.12;
  const LETTER = 6.2; // px of a letter on a bar, and of the room beside it
  const SHORTEST = 4; // letters of a name that is cut
  const MOST_NAMES = 250; // a plot with more of them is slow
  let last = ""; // what was searched for, and how many were found
  let at = -1; // the hit that Enter has come to

  // -- zoom ------------------------------------------------------------------------------------------
  function whole(plot) {
    let end = 0;
    plot.data.forEach((t) => (t.x || []).forEach((x, i) => {
      const to = t.base ? t.base[i] + x : x;
      if (to > end) end = to;
    }));
    return end || 1;
  }

  function show(from, to) {
    NAMES.forEach((name) => {
      const plot = plotOf(name);
      if (plot && plot.data && window.Plotly) window.Plotly.relayout(plot, { "xaxis.range": [from, to] });
    });
  }

  function all() {
    const plot = plotOf("plan-timeline");
    if (plot && plot.data) show(0, whole(plot));
  }

  function move(key) {
    const plot = plotOf("plan-timeline");
    if (!plot || !plot._fullLayout || !plot.data) return;
    const [from, to] = plot._fullLayout.xaxis.range.map(Number);
    const end = Math.max(...NAMES.map(plotOf).filter((p) => p && p.data).map(whole));
    const middle = (from + to) / 2;
    const wide = to - from;
    if (key === "w" || key === "+" || key === "=") show(middle - wide / 2 / ZOOM, middle + wide / 2 / ZOOM);
    else if (key === "s" || key === "-") {
      const half = Math.min(wide * ZOOM, end) / 2;
      const start = Math.max(0, Math.min(middle - half, end - 2 * half));
      show(start, start + 2 * half);
    } else if (key === "0") show(0, end);
    else {
      const by = Math.max(-from, Math.min(wide * PAN * (key === "a" ? -1 : 1), end - to));
      show(from + by, to + by);
    }
  }

  let over = false;
  document.addEventListener("pointerover", (event) => {
    over = Boolean(event.target.closest && event.target.closest("#plan-time .timed"));
  });
  document.addEventListener("keydown", (event) => {
    if (document.documentElement.dataset.page !== "plan") return;
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const focus = document.activeElement;
    if (focus && focus.id === "timeline-search" && event.key === "Enter") {
      event.preventDefault();
      return next(event.shiftKey ? -1 : 1);
    }
    if (focus && /^(INPUT|TEXTAREA|SELECT)$/.test(focus.tagName)) return;
    const inside = focus && focus.closest && focus.closest("#plan-time .timed");
    if (!inside && !(over && (!focus || focus === document.body || focus.id === "content"))) return;
    const key = event.key.length === 1 ? event.key.toLowerCase() : event.key;
    if (!["w", "s", "a", "d", "+", "=", "-", "0", "n"].includes(key)) return;
    event.preventDefault();
    if (key === "n") next(event.shiftKey ? -1 : 1);
    else move(key);
  });

  // Of an action of a pipeline that has no room: F3, as schedules are drawn in papers.
  const shorter = (text) =>
    text.replace(/^(forward|backward) of micro-batch (\d+), .*/, (_, phase, n) => phase[0].toUpperCase() + n);

  // -- names on bars ---------------------------------------------------------------------------------
  // As annotations, which are made for what is shown alone: thousands of texts in bars take seconds to draw.
  function names(plot) {
    const full = plot && plot._fullLayout;
    if (!full || !full.xaxis || !full.yaxis || !window.Plotly) return;
    const [from, to] = full.xaxis.range.map(Number);
    const perPixel = (to - from) / full.xaxis._length;
    const high = full.yaxis._length / Math.max((full.yaxis._categories || []).length, 1);
    const found = [];
    if (high >= 11) plot.data.forEach((trace) => (trace.text || []).forEach((text, i) => {
      const start = Math.max(from, trace.base[i]);
      const end = Math.min(to, trace.base[i] + trace.x[i]);
      const letters = Math.floor((end - start) / perPixel / LETTER) - 1;
      if (letters < 2 || trace.visible === "legendonly") return;
      const brief = text.length <= letters ? text : shorter(text);
      if (brief.length > letters && letters < SHORTEST) return;
      const name = brief.length <= letters ? brief : `${brief.slice(0, letters - 1)}…`;
      found.push({ x: (start + end) / 2, y: trace.y[i], text: name, showarrow: false, captureevents: false,
        font: { size: 11, color: full.paper_bgcolor }, wide: end - start });
    }));
    found.sort((a, b) => b.wide - a.wide);
    const shown = found.slice(0, MOST_NAMES).map(({ wide, ...name }) => name);
    const before = (plot.layout.annotations || []).map((a) => [a.x, a.y, a.text]);
    if (JSON.stringify(before) === JSON.stringify(shown.map((a) => [a.x, a.y, a.text]))) return;
    window.Plotly.relayout(plot, { annotations: shown });
  }

  function follow(plot) {
    if (!plot || plot.named) return;
    plot.named = true;
    plot.on("plotly_relayout", (changed) => { if (!("annotations" in changed)) names(plot); });
    plot.on("plotly_restyle", (changed) => { if ("visible" in (changed[0] || {})) names(plot); });
  }

  // -- search ----------------------------------------------------------------------------------------
  function hits(plot) {
    const field = document.getElementById("timeline-search");
    const wanted = ((field && field.value) || "").trim().toLowerCase();
    if (!wanted || !plot || !plot.data) return [];
    const found = [];
    plot.data.forEach((trace, curve) => (trace.text || []).forEach((text, i) => {
      const words = [text, trace.y[i], ...((trace.customdata || [])[i] || [])];
      if (words.some((w) => String(w || "").toLowerCase().includes(wanted))) {
        found.push({ curve, i, from: trace.base[i], to: trace.base[i] + trace.x[i], text });
      }
    }));
    return found.sort((a, b) => a.from - b.from);
  }

  function say(text) {
    window.dash_clientside.set_props("timeline-found", { children: text });
  }

  function next(step) {
    const found = hits(plotOf("plan-timeline"));
    if (!found.length) return;
    at = at < 0 && step < 0 ? found.length - 1 : (at + step + found.length) % found.length;
    const hit = found[at];
    const room = Math.max((hit.to - hit.from) * 4, whole(plotOf("plan-timeline")) / 200);
    show(Math.max(0, hit.from - room), hit.to + room);
    say(`${at + 1} of ${found.length}: ${hit.text}`);
  }

  function pale(plot, found, searched) {
    if (!window.Plotly || !plot || !plot.data || !plot.data.length) return;
    const opacity = plot.data.map((trace) => (searched ? (trace.text || []).map(() => PALE) : 1));
    found.forEach((hit) => { opacity[hit.curve][hit.i] = 1; });
    // Only what is drawn otherwise: what is drawn anew is told as a new figure, which is searched again.
    const same = plot.data.every((trace, curve) =>
      JSON.stringify((trace.marker || {}).opacity || 1) === JSON.stringify(opacity[curve]));
    if (!same) window.Plotly.restyle(plot, { "marker.opacity": opacity });
  }

  // -- to the operator -------------------------------------------------------------------------------
  function go(group, rows) {
    const known = (rows || []).some((row) => row.group === group);
    if (!group || !known) return [SAME(), SAME()];
    const table = document.getElementById("operators");
    if (table) table.scrollIntoView({ block: "center", behavior: "auto" });
    return [{ ids: [group] }, { rowId: group }];
  }

  window.dash_clientside.timeline = {
    search: function (text) {
      const plot = plotOf("plan-timeline");
      follow(plot);
      names(plot);
      const searched = Boolean((text || "").trim());
      // The field has its text before the page has.
      const found = hits(plot);
      pale(plot, found, searched);
      const now = `${text} ${found.length}`;
      if (now === last && at >= 0) return SAME();
      last = now;
      at = -1;
      if (!searched) return "";
      return found.length ? found.length + (found.length === 1 ? " event" : " events") : "nothing is called that";
    },

    press: function () {
      const fired = window.dash_clientside.callback_context.triggered.map((t) => t.prop_id.split(".")[0]);
      if (fired.includes("timeline-fit")) all();
      if (fired.includes("timeline-in")) move("w");
      if (fired.includes("timeline-out")) move("s");
      if (fired.includes("timeline-before")) next(-1);
      if (fired.includes("timeline-after")) next(1);
      return SAME();
    },

    filterOwners: function (text, options) {
      return { ...options, quickFilterText: String(text || "").slice(0, 80) };
    },

    fromOwner: function (selected, rows) {
      return go(selected && selected.length ? selected[0].group : "", rows);
    },

    fromEvent: function (clicked, rows) {
      const point = clicked && clicked.points && clicked.points[0];
      return go(point && point.customdata ? point.customdata[0] : "", rows);
    },
  };
})();
