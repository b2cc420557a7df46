// What runs in the browser: the state in the URL, the theme, the arrow keys. No figures are computed here.
window.dash_clientside = window.dash_clientside || {};
(function () {
  const SAME = () => window.dash_clientside.no_update;
  // What the plot is drawn from; everything else of the state only moves the selection.
  const FRAME = ["exploration", "headroom", "log_x", "log_y", "lines", "band", "marks", "mesh", "micro", "devices", "price",
    "across", "up", "amount", "currency"];
  // What tables and sentences about the whole frontier depend on.
  const LISTED = ["exploration", "headroom", "price", "amount", "currency"];
  const DRAWN = "drawn";
  const MOVED = ["point", "other", "budget_bytes", "target_s"];
  // What no control shows: the plot and the table do.
  const SHOWN_BY_PLOT = ["point", "other"];
  const PAGES = ["fit", "explore", "frontier", "runs", "plan", "export"];
  const LATER = ["fit", "explore", "plan"];
  const IDLE_MS = 2000;
  const LOST_MS = 5000;
  let asked = 0; // when the pages that were left out were asked for
  const IN_URL = {
    exploration: "x", point: "point", other: "other", budget_bytes: "budget", target_s: "target",
    headroom: "headroom", price: "price", log_x: "logx", log_y: "logy", lines: "lines", band: "band",
    marks: "marks", mesh: "mesh", micro: "micro", devices: "devices",
    across: "across", up: "up", amount: "amount", currency: "currency",
  };

  function subset(state, names) {
    const found = {};
    names.forEach((n) => { found[n] = state[n]; });
    return found;
  }

  const same = (a, b) => JSON.stringify(a) === JSON.stringify(b);

  function query(state) {
    const defaults = state.defaults || {};
    const pairs = [];
    Object.keys(IN_URL).forEach((name) => {
      const value = state.view[name];
      if (value === null || value === undefined || value === defaults[name]) return;
      const counted = name === "point" || name === "other"; // people count from 1
      const written = typeof value === "boolean" ? Number(value) : counted ? value + 1 : value;
      pairs.push(IN_URL[name] + "=" + encodeURIComponent(written));
    });
    return pairs.length ? "?" + pairs.join("&") : "";
  }

  const STEP_MS = 1000; // changes closer together are one step of the browser's history
  let wrote = 0;
  let touched = false; // by its reader, since the page was loaded
  ["pointerdown", "keydown"].forEach((name) => {
    document.addEventListener(name, () => { touched = true; }, { capture: true });
  });

  document.addEventListener("visibilitychange", () => {
    if (!document.hidden) document.title = document.title.replace(/^● /, "");
  });

  // Dash hears of addresses that it wrote itself only. It writes one that it still holds again: all parts are told.
  window.addEventListener("popstate", () => {
    const { pathname, search, hash, href } = window.location;
    window.dash_clientside.set_props("url", { pathname, search, hash, href });
  });

  // The plot with its axes as they are, null before it is drawn.
  function drawnPlot() {
    const plot = document.querySelector("#graph .js-plotly-plot");
    return plot && plot._fullLayout ? plot : null;
  }

  // All of the frontier, over the axes of now: a double click, and the button that resets, go to what Plotly drew first.
  document.addEventListener("mousedown", (event) => {
    const plot = event.target.closest && event.target.closest("#graph") && drawnPlot();
    const whole = plot && plot.layout.meta?.whole;
    if (!whole) return;
    [plot._fullLayout.xaxis, plot._fullLayout.yaxis].forEach((axis, i) => {
      [axis._rangeInitial0, axis._rangeInitial1] = whole[i];
    });
  }, true);

  window.dash_clientside.tensoropt = {
    // A person closed the notice.
    closed: function () {
      return null;
    },

    // Follows an address as a link on the page does (`dcc.Link`).
    follow: function (href) {
      if (href) {
        window.history.pushState({}, "", href);
        window.dispatchEvent(new CustomEvent("_dashprivate_pushstate"));
        window.scrollTo(0, 0);
      }
      return SAME();
    },

    // The form was filled from an earlier exploration: go where that is said.
    cleared: () => null,
    refilled: function (said) {
      const place = document.getElementById("refill-said");
      if (!said || !place) return SAME();
      // As a person would go there, so that the address, the page and the way back agree.
      const away = document.documentElement.dataset.page !== "explore";
      if (away) document.getElementById("nav-explore").click();
      window.setTimeout(() => {
        place.scrollIntoView({ block: "center" });
        place.focus({ preventScroll: true });
      }, 150);
      return SAME();
    },

    // What the browser's tab says: which page, and of what.
    title: function (page, key, groups, notice) {
      const items = (groups || []).flatMap((group) => group.items || []);
      const label = (items.find((item) => item.value === key) || {}).label;
      const name = page ? page[0].toUpperCase() + page.slice(1) : "";
      // A job has ended while another tab was looked at.
      const news = notice && document.hidden ? "● " : "";
      document.title = news + [name, page === "explore" ? "" : label, "TensorOpt"].filter(Boolean).join(" · ");
      return SAME();
    },

    // What a person zoomed into, kept while the plot is drawn anew; nothing once all is shown again.
    zoom: function (moved, kept) {
      const plot = drawnPlot();
      const names = Object.keys(moved || {});
      if (!plot || !names.some((n) => /^[xy]axis\./.test(n))) return SAME();
      const { xaxis, yaxis, uirevision } = plot._fullLayout;
      if (same([xaxis.range, yaxis.range], plot.layout.meta?.whole)) return null;
      return { x: xaxis.range.slice(), y: yaxis.range.slice(), of: uirevision };
    },

    scheme: function (clicks, chosen) {
      const system = window.matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
      let now = chosen || system;
      if (clicks) now = document.documentElement.dataset.scheme === "dark" ? "light" : "dark";
      document.documentElement.dataset.scheme = now;
      document.body.dataset.agThemeMode = now;
      return [now, now, now === "dark" ? "Light" : "Dark", clicks ? now : chosen || SAME()];
    },

    // Which controls fired, the latest last.
    fired: function () {
      const values = Array.from(arguments);
      const known = values[values.length - 1] || [];
      const now = window.dash_clientside.callback_context.triggered.map((t) => t.prop_id);
      return known.filter((name) => !now.includes(name)).concat(now);
    },

    // Pages that were left out are made once the first picture stands and the browser has nothing else to do, or at
    // once when one of them is asked for.
    making: function (page, drawn, made) {
      const left = LATER.filter((name) => !(made || []).includes(name));
      const ask = () => {
        // Once, but again where the answer has been lost.
        if (!left.length || Date.now() - asked < LOST_MS) return;
        asked = Date.now();
        window.dash_clientside.set_props("making", { data: asked });
      };
      if (left.includes(page)) ask();
      else if (drawn || page !== "frontier") {
        // Safari has no idle callbacks.
        if (window.requestIdleCallback) window.requestIdleCallback(ask, { timeout: IDLE_MS });
        else window.setTimeout(ask, IDLE_MS);
      }
      return SAME();
    },

    // A slider of powers of two and the field beside it: each follows the other.
    power: function (text, power) {
      const by = window.dash_clientside.callback_context.triggered[0].prop_id;
      if (by.includes("-slid.")) return [String(2 ** power), SAME()];
      const number = Number(text);
      return [SAME(), number >= 1 ? Math.round(Math.log2(number)) : SAME()];
    },

    // Scripts that look for elements of pages look again.
    made: function () {
      // Now, and when a slow browser has drawn them.
      [0, 300, 2000].forEach((ms) => window.setTimeout(() => window.dispatchEvent(new Event("tensoropt-made")), ms));
      return SAME();
    },

    page: function (path) {
      const name = (path || "").replace(/^\/+|\/+$/g, "");
      const page = PAGES.includes(name) ? name : "frontier";
      const left = document.documentElement.dataset.page;
      document.documentElement.dataset.page = page;
      document.querySelectorAll("nav a.nav").forEach((link) => {
        if (link.classList.contains("nav-" + page)) link.setAttribute("aria-current", "page");
        else link.removeAttribute("aria-current");
      });
      window.setTimeout(() => {
        window.dispatchEvent(new Event("resize"));
        // A link of the page that was left is not to be seen any more: the keyboard goes on in the new page.
        const at = document.activeElement;
        const lost = !at || at === document.body || !at.checkVisibility();
        if (lost && left && left !== page) document.getElementById("content")?.focus({ preventScroll: true });
      }, 50);
      return [page, window.innerWidth < 700];
    },

    // The state by what depends on it, so that a choice starts only what it changes.
    split: function (state, renewed, ...before) {
      const drawn = before.pop();
      if (!state) return before.map(SAME);
      const frame = subset(state.view, FRAME);
      const listing = subset(state.view, LISTED);
      // The exploration itself has changed: what shows it is drawn again, though nothing else was chosen.
      if (renewed) frame.renewed = listing.renewed = renewed;
      const controls = subset(state.view, Object.keys(state.view).filter((n) => !SHOWN_BY_PLOT.includes(n)));
      const selection = MOVED.map((name) => state.view[name]);
      // The plot that came with the page has its selection.
      before[3] = (before[3] || (drawn || [])[2] || []).slice(0, MOVED.length);
      const parts = [frame, listing, controls, selection, state.view];
      const told = parts.map((part, i) => (same(part, before[i]) ? SAME() : part));
      // A plot that is drawn anew has it.
      if (told[0] !== SAME() && told[3] !== SAME()) told[3] = selection.concat(DRAWN);
      return told;
    },

    // The plot stands: what is listed below it, if that is another thing now, and a selection that moved while it was
    // drawn and is not in it.
    after: function (drawn, listing, listed, selection) {
      if (!drawn) return [SAME(), SAME()];
      const missed = selection && !same(selection.slice(0, MOVED.length), drawn[2]);
      return [
        same(listing, listed) ? SAME() : Date.now(),
        missed ? selection.slice(0, MOVED.length).concat(Date.now()) : SAME(),
      ];
    },

    // What each page is drawn from, told to the one that is shown: a choice asks the server for what is seen.
    shown: function (page, pick) {
      return ["plan", "export"].map((name) => (page === name ? pick : SAME()));
    },

    write: function (state, runs) {
      if (!state) return [SAME(), ...PAGES.map(SAME)];
      const more = window.dash_clientside.runs.query(runs);
      const own = query(state);
      const search = more ? (own || "?") + (own ? "&" : "") + more : own;
      const here = window.location.pathname + search;
      if (window.location.pathname + window.location.search !== here) {
        // A place to come back to: not the page's own first words, nor every step of what goes on quickly.
        const now = Date.now();
        const step = touched && now - wrote > STEP_MS;
        window.history[step ? "pushState" : "replaceState"](window.history.state, "", here);
        if (touched) wrote = now;
      }
      return [search, ...PAGES.map((name) => "/" + name + search)];
    },
  };

  // Arrow keys walk along the frontier wherever nothing else wants them. A step is relative to where the last one
  // led, so that one is sent at a time; what is pressed meanwhile is added up and follows.
  const STEPS = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, PageDown: -10, PageUp: 10 };
  const ENDS = { Home: "leanest", End: "fastest", k: "knee", c: "compare" };
  const PATIENCE_MS = 5000; // after which an answer is no longer waited for
  let queue = [];
  let pressed = 0;
  let waiting = 0; // the number of the press that is on its way, 0 for none
  let since = 0;

  function send() {
    if (!queue.length || (waiting && Date.now() - since < PATIENCE_MS)) return;
    const next = queue.shift();
    while (next.step && queue.length && queue[0].step) next.step += queue.shift().step;
    if (!next.step && !next.word) return send(); // as many steps back as forth
    pressed += 1;
    waiting = pressed;
    since = Date.now();
    window.dash_clientside.set_props("key", { data: { step: next.step, word: next.word, n: pressed } });
  }

  window.dash_clientside.tensoropt.answered = function (number) {
    if (number >= waiting) waiting = 0;
    send();
    return SAME();
  };

  // The server is there again: what had no answer is asked once more.
  window.addEventListener("tensoropt-back", () => {
    waiting = 0;
    pressed += 1;
    window.dash_clientside.set_props("key", { data: { step: 0, word: "", n: pressed } });
  });

  document.addEventListener("keydown", (event) => {
    if (document.documentElement.dataset.page !== "frontier") return;
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const at = document.activeElement;
    // Links and buttons want none of these keys; fields, tables and sliders do.
    const idle = !at || at === document.body || at.matches("#content, #plot, nav a, button:not([role]):not([aria-haspopup])");
    if (!idle) return;
    const step = STEPS[event.key];
    const word = ENDS[event.key];
    if (step === undefined && word === undefined) return;
    event.preventDefault();
    queue.push({ step: step || 0, word: word || "" });
    send();
  });
})();
