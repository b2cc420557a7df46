// The runs page: which runs are shown is decided here, without the server; the URL keeps it.
window.dash_clientside = window.dash_clientside || {};
(function () {
  const SAME = () => window.dash_clientside.no_update;
  const FLAGS = ["total", "sample", "logx", "logy", "rate"];
  const LINEAR = { logx: "linx", logy: "liny" }; // in the URL what is not usual: models differ by factors
  const LEGEND = 12; // runs that are named below the plot; with more, the table's colours say which is which
  const REST_MS = 150; // an assumption: a pointer that stays so long looks at a point
  const USERS = ["checkboxSelected", "spaceKey", "uiSelectAll", "uiSelectAllFiltered", "rowClicked"];
  const names = {}; // of plans, by run
  let view = null;
  let known = null;
  let at = null; // the point that is looked at: [trace, point]
  let timer = 0;
  let resting = 0;
  let late = null; // rows that came while a cell was being edited

  // -- the URL ------------------------------------------------------------------------------------------

  const packed = (key) => encodeURIComponent(key.replace(/%/g, "%25").replace(/,/g, "%2C"));

  function parsed(search) {
    const found = { shown: null };
    FLAGS.forEach((flag) => { found[flag] = flag in LINEAR; });
    (search || "").replace(/^\?/, "").split("&").forEach((pair) => {
      const [name, ...rest] = pair.split("=");
      if (name !== "runs" && name !== "runaxes") return;
      let text = "";
      try { text = decodeURIComponent(rest.join("=")); } catch (error) { return; } // written by hand, badly
      const said = (flag) => text.split(",").includes(flag);
      if (name === "runaxes") FLAGS.forEach((flag) => { found[flag] = flag in LINEAR ? !said(LINEAR[flag]) : said(flag); });
      else if (text === "all") found.shown = "all";
      else if (text === "none") found.shown = [];
      else if (text) {
        found.shown = text.split(",").map((key) => {
          try { return decodeURIComponent(key); } catch (error) { return key; }
        });
      }
    });
    return found;
  }

  // What the runs page adds to every link; what the address has already until this page has read it.
  function query(kept) {
    const now = kept || parsed(window.location.search);
    const parts = [];
    if (now.shown === "all") parts.push("runs=all");
    else if (now.shown) parts.push("runs=" + (now.shown.length ? now.shown.map(packed).join(",") : "none"));
    const flags = FLAGS.map((flag) => (flag in LINEAR ? !now[flag] && LINEAR[flag] : now[flag] && flag)).filter(Boolean);
    if (flags.length) parts.push("runaxes=" + flags.join(","));
    return parts.join("&");
  }

  function go(key, point) {
    const params = new URLSearchParams(window.location.search);
    ["other", "budget", "target", "mesh", "micro", "devices", "point"].forEach((name) => params.delete(name));
    params.set("x", key);
    if (point) params.set("point", point);
    window.history.pushState({}, "", "/frontier?" + params.toString());
    window.dispatchEvent(new CustomEvent("_dashprivate_pushstate"));
    window.scrollTo(0, 0);
  }

  // -- what is shown ------------------------------------------------------------------------------------

  function shown() {
    if (!known) return new Set();
    if (!view || view.shown === null) return new Set(known.usual);
    if (view.shown === "all") return new Set(known.order);
    return new Set(known.order.filter((key) => view.shown.includes(key)));
  }

  function choose(keys) {
    const all = known.order.every((key) => keys.has(key));
    const list = all ? "all" : known.order.filter((key) => keys.has(key));
    window.dash_clientside.set_props("runs-view", { data: { ...view, shown: list } });
  }

  const plot = () => document.querySelector("#runs-graph .js-plotly-plot");

  function grid() {
    try { return window.dash_ag_grid.getApi("runs-table"); } catch (error) { return null; }
  }

  function listed(api) {
    const found = [];
    if (api) api.forEachNodeAfterFilter((node) => found.push(node.id));
    return found;
  }

  // The boxes of the table follow what is shown.
  function tick(api) {
    if (!api || !known) return;
    if (!api.runsWatched) {
      api.runsWatched = true;
      api.addEventListener("selectionChanged", (event) => {
        if (!USERS.includes(event.source)) return;
        const keys = new Set();
        api.forEachNode((node) => { if (node.isSelected()) keys.add(node.id); });
        choose(keys);
      });
      api.addEventListener("rowDataUpdated", () => tick(api));
      api.addEventListener("cellEditingStopped", (event) => {
        // What has just been changed is answered with rows of its own.
        if (late && !event.valueChanged) window.dash_clientside.set_props("runs-table", { rowData: late });
        late = null;
      });
    }
    const want = shown();
    const on = [];
    const off = [];
    api.forEachNode((node) => {
      if (Boolean(node.isSelected()) !== want.has(node.id)) (want.has(node.id) ? on : off).push(node);
    });
    if (on.length) api.setNodesSelected({ nodes: on, newValue: true, source: "api" });
    if (off.length) api.setNodesSelected({ nodes: off, newValue: false, source: "api" });
  }

  function differing(gd, want) {
    return known.order.map((key, i) => i).filter((i) => (gd.data[i].visible !== false) !== want.has(known.order[i]));
  }

  function lineOf(gd, i) {
    const drawn = gd.calcdata && gd.calcdata[i] && gd.calcdata[i][0] && gd.calcdata[i][0].node3;
    const node = drawn && drawn.node();
    return node && node.isConnected ? node : null;
  }

  // The lines of the plot do too. A plot that is just being drawn is looked at again.
  function draw() {
    const gd = plot();
    if (!gd || !gd.data || !known || !window.Plotly || gd.data.length !== known.order.length) return;
    const want = shown();
    const changed = differing(gd, want);
    // Hidden a moment ago and shown again: the plot still has it, its line is out of sight.
    known.order.forEach((key, i) => {
      const line = lineOf(gd, i);
      if (line && want.has(key) && line.style.display) line.style.display = "";
    });
    if (!changed.length) return;
    // At once: the lines themselves. Axes and what can be pointed at follow when a person rests.
    let there = true;
    changed.forEach((i) => {
      const line = lineOf(gd, i);
      if (line && !want.has(known.order[i])) line.style.display = "none";
      else if (!line && want.has(known.order[i])) there = false; // was never drawn
    });
    window.clearTimeout(resting);
    resting = window.setTimeout(redraw, there ? REST_MS : 0);
  }

  function redraw() {
    const gd = plot();
    if (!gd || !gd.data || !known || gd.data.length !== known.order.length) return;
    const want = shown();
    const changed = differing(gd, want);
    if (!changed.length) return;
    const layout = {};
    ((gd.layout && gd.layout.shapes) || []).forEach((shape, i) => {
      const near = known.order.some((key) => {
        const run = known.facts[key];
        return want.has(key) && shape.name.split("|").includes(run.kind) && run.most >= run.capacity / 2;
      });
      if (Boolean(shape.visible) !== near) layout["shapes[" + i + "].visible"] = near;
    });
    window.Plotly.update(gd, { visible: changed.map((i) => want.has(known.order[i])) }, layout, changed);
  }

  // -- words --------------------------------------------------------------------------------------------

  const tag = (type, children, className, more) => ({
    type, namespace: "dash_html_components", props: { children, className, ...(more || {}) },
  });

  // What the runs that are shown have in common, and in what they differ.
  function compared(keys) {
    if (!keys.length) return ["No run is shown: tick a box in the table.", []];
    const alike = [];
    const differ = [];
    known.compared.forEach(([field, title]) => {
      const values = [...new Set(keys.map((key) => known.facts[key][field] ?? ""))];
      if (values.length > 1) differ.push([field, title]);
      // A model's shapes, and settings that are not set, say nothing by themselves.
      else if (values[0] !== "" && field !== "graph") alike.push(title + " " + values[0]);
    });
    if (keys.length === 1) return ["One run: " + alike.join(", ") + ".", []];
    const other = differ.filter(([field]) => field !== "graph" || !differ.some(([f]) => f === "model" || f === "batch"));
    const said = [];
    if (alike.length) said.push("Alike: " + alike.join(", ") + ".");
    said.push(other.length ? "Differ: " + other.map(([, title]) => title).join(", ") + "." : "All settings are alike.");
    return [said.join(" "), differ.map(([field]) => field).filter((field) => known.work.includes(field))];
  }

  function warning(work) {
    const main = work.filter((field) => field !== "graph");
    if (!work.length) return "";
    if (!main.length) return "The models' shapes differ: a step is not the same work in every run.";
    if (main.length === 1 && main[0] === "batch") {
      return view && (view.sample || view.rate) ? ""
        : "Steps have batches of different sizes: compare the time per sample, or samples per second.";
    }
    return "A step is not the same work in every run: " + main.join(", ") + " differ.";
  }

  const listing = (keys) => keys.slice(0, 3).map((key) => known.facts[key].label).join(", ")
    + (keys.length > 3 ? " and others" : "");

  function said(keys) {
    const [text, work] = compared(keys);
    const warn = warning(work);
    const found = [tag("P", text, "runs-alike")];
    if (warn) found.push(tag("P", warn, "note note-warn"));
    const timeless = keys.filter((key) => (view.sample || view.rate) && known.facts[key].points && !(known.facts[key].batch > 0));
    if (timeless.length) {
      found.push(tag("P", listing(timeless) + ": the batch is not known, so that there are no figures of samples.", "note note-warn"));
    }
    const gone = Array.isArray(view.shown) ? view.shown.filter((key) => !known.order.includes(key)) : [];
    if (gone.length) {
      found.push(tag("P", `${gone.length} of the runs in this link ${gone.length === 1 ? "is" : "are"} not here.`, "note note-warn"));
    }
    return found;
  }

  function legend(keys) {
    const api = grid();
    if (keys.length > LEGEND) {
      return tag("Span", "The table's colours, and what a point says, tell these many runs apart.", "muted");
    }
    const order = listed(api).filter((key) => keys.includes(key)); // as the table has them
    const rest = keys.filter((key) => !order.includes(key));
    return [...order, ...rest].filter((key) => known.facts[key].look).map((key) => ({
      type: "Span", namespace: "dash_html_components",
      props: { className: "runs-key", children: [drawing(known.facts[key].look), known.facts[key].label] },
    }));
  }

  // -- a run's look -------------------------------------------------------------------------------------

  const COLOURS = ["blue", "orange", "green", "pink", "sky", "ink"];
  const DASHES = { solid: "", dash: "5 3", dot: "1.5 2.5", dashdot: "6 2 1.5 2" };
  const polygon = (n, turn, inner) => Array.from({ length: inner ? 2 * n : n }, (_, i) => {
    const angle = turn + (i * 2 * Math.PI) / (inner ? 2 * n : n);
    const r = inner && i % 2 ? inner : 4.6;
    return (18 + r * Math.cos(angle)).toFixed(1) + "," + (7 + r * Math.sin(angle)).toFixed(1);
  }).join(" ");
  const SYMBOLS = {
    square: polygon(4, Math.PI / 4), diamond: polygon(4, 0), "triangle-up": polygon(3, -Math.PI / 2),
    "triangle-down": polygon(3, Math.PI / 2), pentagon: polygon(5, -Math.PI / 2), star: polygon(5, -Math.PI / 2, 1.9),
    cross: "16.4,2.8 19.6,2.8 19.6,5.4 22.2,5.4 22.2,8.6 19.6,8.6 19.6,11.2 16.4,11.2 16.4,8.6 13.8,8.6 13.8,5.4 16.4,5.4",
  };
  const spoken = (look) => COLOURS[look[0]] + (look[1] === "solid" ? "" : ", " + look[1]) + ", " + look[2];

  // A line with its mark, as a picture: Dash has no component for SVG, so that it is an image in the page's colours.
  function drawing(look) {
    const ink = window.getComputedStyle(document.documentElement).getPropertyValue("--run-" + look[0]).trim();
    const mark = look[2] === "circle" ? `<circle cx='18' cy='7' r='4' fill='${ink}'/>`
      : `<polygon points='${SYMBOLS[look[2]]}' fill='${ink}'/>`;
    const svg = `<svg xmlns='http://www.w3.org/2000/svg' width='36' height='14'>`
      + `<line x1='1' x2='35' y1='7' y2='7' stroke='${ink}' stroke-width='2' stroke-dasharray='${DASHES[look[1]]}'/>${mark}</svg>`;
    return {
      type: "Img", namespace: "dash_html_components",
      props: { src: "data:image/svg+xml," + encodeURIComponent(svg), alt: spoken(look), width: 36, height: 14 },
    };
  }

  const cells = (window.dashAgGridComponentFunctions = window.dashAgGridComponentFunctions || {});
  cells.RunSwatch = function (props) {
    const look = props.data && props.data.look;
    if (!look) return null;
    const make = window.React.createElement;
    const mark = look[2] === "circle" ? make("circle", { cx: 18, cy: 7, r: 4, className: "run-mark" })
      : make("polygon", { points: SYMBOLS[look[2]], className: "run-mark" });
    const line = make("line", { x1: 1, x2: 35, y1: 7, y2: 7, strokeWidth: 2, strokeDasharray: DASHES[look[1]] });
    return make("svg", { width: 36, height: 14, role: "img", "aria-label": spoken(look), className: "run-c" + look[0] }, line, mark);
  };
  cells.RunLink = function (props) {
    const follow = (event) => {
      if (event.ctrlKey || event.metaKey || event.shiftKey) return; // another tab is the browser's
      event.preventDefault();
      go(props.data.id);
    };
    return window.React.createElement("a", {
      href: "/frontier?x=" + encodeURIComponent(props.data.id), onClick: follow, tabIndex: -1,
      "aria-label": "Open " + props.data.name,
    }, "open");
  };
  const functions = (window.dashAgGridFunctions = window.dashAgGridFunctions || {});
  // Names that are alike say nothing where there is no room for the columns that tell them apart; nor does a folder's
  // name alone, which is all that tells some apart.
  functions.runName = (params) => {
    const apart = params.data.apart || "";
    return window.innerWidth < 700 && apart && !apart.startsWith("(") ? apart : params.value;
  };
  functions.openRun = (params) => {
    if (params.event.key === "Enter" && params.column.getColId() === "open") go(params.node.id);
  };

  // -- points -------------------------------------------------------------------------------------------

  function say() {
    const gd = plot();
    const place = document.getElementById("runs-point");
    if (!gd || !place || !at) return;
    const [i, j] = at;
    const key = known.order[i];
    const run = known.facts[key];
    const trace = gd.data[i];
    if (!run || !trace.customdata || !trace.customdata[j]) return;
    const unit = (axis) => gd.layout[axis].title.text.split(", ").pop();
    const number = trace.customdata[j][0];
    const size = Number(trace.x[j].toPrecision(4)) + " " + unit("xaxis") + (view && view.total ? " in all" : "");
    const time = Number(trace.y[j].toPrecision(4)) + " " + unit("yaxis") + (view && view.sample ? " per sample" : "");
    const plan = (names[key] || [])[number - 1];
    place.textContent = `${run.label}, point ${number} of ${run.points.toLocaleString("en")}: ${size}, ${time}`
      + (plan ? " · " + plan : "");
    if (plan === undefined) {
      window.clearTimeout(timer);
      timer = window.setTimeout(() => window.dash_clientside.set_props("runs-asked", { data: key }), REST_MS);
    }
  }

  const wrapped = (name) => "<br>" + name.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/ · /g, "<br>");

  function fill(gd, i) {
    const known_names = names[known.order[i]];
    if (!known_names || !gd.data[i]) return;
    gd.data[i].customdata.forEach((cell) => { cell[1] = wrapped(known_names[cell[0] - 1] || ""); });
  }

  function point(i, j) {
    const gd = plot();
    at = [i, j];
    fill(gd, i);
    window.Plotly.Fx.hover(gd, [{ curveNumber: i, pointNumber: j }]);
    say();
  }

  const KEYS = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
  document.addEventListener("keydown", (event) => {
    const gd = plot();
    if (!document.activeElement || document.activeElement.id !== "runs-plot" || !gd || !gd.data || !known) return;
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const there = known.order.map((key, i) => i).filter((i) => gd.data[i] && gd.data[i].visible !== false && gd.data[i].x.length);
    if (event.key === "Enter" && at) {
      event.preventDefault();
      go(known.order[at[0]], gd.data[at[0]].customdata[at[1]][0]);
      return;
    }
    if (!KEYS[event.key] || !there.length) return;
    event.preventDefault();
    if (!at || !there.includes(at[0])) return point(there[0], 0);
    const [other, step] = KEYS[event.key];
    if (!other) {
      return point(at[0], Math.min(Math.max(at[1] + step, 0), gd.data[at[0]].x.length - 1));
    }
    const next = there[(there.indexOf(at[0]) + other + there.length) % there.length];
    // The other run's point that is nearest in memory.
    const x = gd.data[at[0]].x[at[1]];
    let best = 0;
    gd.data[next].x.forEach((value, j) => { if (Math.abs(value - x) < Math.abs(gd.data[next].x[best] - x)) best = j; });
    return point(next, best);
  });

  // What the control of the times says; the URL, which people may write, could have both.
  const meant = (now) => now.rate ? "rate" : now.sample ? "sample" : "step";

  window.dash_clientside.runs = {
    query,

    // The URL decides when the page opens or a link is followed, the controls otherwise.
    state: function (search, memory, time, logs, kept, axes) {
      const fired = window.dash_clientside.callback_context.triggered.map((t) => t.prop_id);
      const read = !kept || fired.includes("url.search");
      const now = read ? parsed(window.location.search)
        : { ...kept, total: memory === "total", sample: time === "sample", rate: time === "rate", logx: logs.includes("logx"), logy: logs.includes("logy") };
      const drawn = {};
      FLAGS.forEach((flag) => { drawn[flag] = now[flag]; });
      const same = (a, b) => JSON.stringify(a) === JSON.stringify(b);
      view = same(now, kept) ? kept : now;
      const wanted = ["logx", "logy"].filter((flag) => now[flag]);
      return [
        view === kept ? SAME() : now,
        same(drawn, axes) ? SAME() : drawn,
        read && memory !== (now.total ? "total" : "device") ? (now.total ? "total" : "device") : SAME(),
        read && time !== meant(now) ? meant(now) : SAME(),
        read && !same(logs, wanted) ? wanted : SAME(),
      ];
    },

    show: function (kept, told, drawn) {
      if (!told || !kept) return [SAME(), SAME(), SAME()];
      if (told !== known) at = null;
      view = kept;
      known = told;
      draw();
      // The figure that has just come may still be on its way to the screen.
      if (window.dash_clientside.callback_context.triggered.some((t) => t.prop_id.startsWith("runs-drawn"))) {
        window.setTimeout(draw, 300);
        window.setTimeout(draw, 1500);
      }
      const api = grid();
      tick(api);
      if (!api) window.setTimeout(() => tick(grid()), 500);
      const keys = known.order.filter((key) => shown().has(key));
      const visible = listed(api);
      const unlisted = keys.filter((key) => !visible.includes(key)).length;
      const count = `${keys.length} of ${known.order.length} shown`
        + (api && visible.length < known.order.length ? `, ${visible.length} listed` : "")
        + (api && visible.length && unlisted ? `; ${unlisted} of those shown are not listed` : "");
      return [said(keys), legend(keys), count];
    },

    // New rows would end what is being typed into a cell: they wait.
    rows: function (rows) {
      const api = grid();
      late = api && api.getEditingCells().length ? rows : null;
      return late ? SAME() : rows;
    },

    search: function (text) {
      const api = grid();
      if (api) api.setGridOption("quickFilterText", text || "");
      return text;
    },

    many: function () {
      const which = window.dash_clientside.callback_context.triggered[0].prop_id.split(".")[0];
      if (!known) return SAME();
      if (which === "runs-csv") {
        const columns = grid().getColumns().map((c) => c.getColId());
        const left = ["open", "style", "ag-Grid-SelectionColumn"];
        grid().exportDataAsCsv({
          fileName: "runs.csv",
          columnKeys: columns.filter((c) => !left.includes(c)),
          // Numbers as they are; what a spreadsheet would take for a formula is a text.
          processCellCallback: ({ value }) => (/^[=+\-@\t\r]/.test(typeof value === "string" ? value : "") ? "'" + value : value),
        });
        return SAME();
      }
      const keys = which === "runs-all" ? shown() : new Set();
      if (which !== "runs-none") listed(grid()).forEach((key) => keys.add(key));
      choose(keys);
      return Date.now();
    },

    open: function (click) {
      const hit = click && click.points && click.points[0];
      if (hit && known && hit.customdata) go(known.order[hit.curveNumber], hit.customdata[0]);
      return SAME();
    },

    hover: function (hovered) {
      const hit = hovered && hovered.points && hovered.points[0];
      if (hit && known) {
        at = [hit.curveNumber, hit.pointNumber ?? hit.pointIndex];
        fill(plot(), at[0]);
        say();
      }
      return SAME();
    },

    // The plans' names have come: what is looked at says its own.
    named: function (told) {
      if (!told) return SAME();
      names[told.key] = told.names;
      const gd = plot();
      if (gd && at && known && known.order[at[0]] === told.key) point(at[0], at[1]);
      return SAME();
    },
  };
})();
