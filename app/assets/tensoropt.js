// What runs in the browser beside the components: the address, which is the state, and the theme. No figures are
// computed here.
window.dash_clientside = window.dash_clientside || {};
(function () {
  const SAME = () => window.dash_clientside.no_update;
  const PAGES = ["result", "new", "details"];
  const NAMES = { result: "Result", new: "Plan it", details: "Details" };
  const GRID = "/_dash-component-suites/dash_ag_grid/dash_ag_grid.min.js";
  const STEP_MS = 1000; // changes closer together are one step of the browser's history
  const REST_MS = 400; // of a person who types
  let wrote = 0;
  let typed = 0;

  // Follows an address as a link on the page does (`dcc.Link`).
  function go(href, top) {
    if (href === window.location.pathname + window.location.search) return;
    const now = Date.now();
    const step = now - wrote > STEP_MS || !href.startsWith(window.location.pathname);
    wrote = now;
    window.history[step ? "pushState" : "replaceState"]({}, "", href);
    window.dispatchEvent(new CustomEvent("_dashprivate_pushstate"));
    if (top) window.scrollTo(0, 0);
  }

  // The address with some of its parts changed; an empty text takes one away. Commas and units stay readable.
  function changed(parts) {
    const asked = new URLSearchParams(window.location.search);
    Object.entries(parts).forEach(([name, text]) => (text === "" ? asked.delete(name) : asked.set(name, text)));
    const query = asked.toString().replace(/%2C/g, ",");
    return "/result" + (query ? "?" + query : "");
  }
  window.tensoropt = { go, changed };

  document.addEventListener("visibilitychange", () => {
    if (!document.hidden) document.title = document.title.replace(/^● /, "");
  });

  // Dash hears of addresses that it wrote itself only. It writes one that it still holds again: all parts are told.
  window.addEventListener("popstate", () => {
    const { pathname, search, hash, href } = window.location;
    window.dash_clientside.set_props("url", { pathname, search, hash, href });
  });

  // A link to what is seen, whatever it is on another machine.
  document.addEventListener("click", (event) => {
    const share = event.target.closest && event.target.closest("#share");
    if (!share) return;
    const copied = () => { share.textContent = "Link copied"; };
    const failed = () => { share.textContent = "Copy the address above"; };
    if (navigator.clipboard) navigator.clipboard.writeText(window.location.href).then(copied, failed);
    else failed();
    window.setTimeout(() => { share.textContent = "Share"; }, 3000);
  });

  window.dash_clientside.tensoropt = {
    closed: () => null, // a person closed the notice
    follow: function (href) {
      if (href) go(href, false);
      return SAME();
    },

    // The script of tables with many rows comes when the first is wanted.
    grid: function (wanted) {
      if (!wanted || (typeof wanted === "string" && wanted !== "details")) return SAME();
      if (window.dash_ag_grid) return true;
      return new Promise((done) => {
        const script = document.createElement("script");
        Object.assign(script, { src: GRID, onload: () => done(true), onerror: () => done(SAME()) });
        document.head.append(script);
      });
    },

    // The form's fields, when a person rests: the first time at once.
    typed: function (...values) {
      const mine = ++typed;
      return new Promise((done) => {
        window.setTimeout(() => done(mine === typed ? values : SAME()), mine === 1 ? 0 : REST_MS);
      });
    },

    // A person picked another exploration, or others beside it: not those that the page itself wrote there.
    picked: function (key, beside, shown) {
      const [was, others] = shown || [null, []];
      const wanted = (beside || []).filter((one) => one !== key).join(",");
      if (!key || (key === was && wanted === others.join(","))) return SAME();
      const form = { from: "", devices: "", batch: "" };
      const another = key === was ? {} : { point: "", budget: "", time: "", whole: "" };
      go(changed({ x: key, beside: wanted, ...form, ...another }));
      return SAME();
    },

    // What the browser's tab says: which page, and of what.
    title: function (page, key, groups, notice) {
      const items = (groups || []).flatMap((group) => group.items || []);
      const label = (items.find((item) => item.value === key) || {}).label;
      // A job has ended while another tab was looked at.
      const news = notice && document.hidden ? "● " : "";
      document.title = news + [NAMES[page], page === "new" ? "" : label, "TensorOpt"].filter(Boolean).join(" · ");
      return SAME();
    },

    scheme: function (clicks, chosen) {
      const system = window.matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
      let now = chosen || system;
      if (clicks) now = document.documentElement.dataset.scheme === "dark" ? "light" : "dark";
      document.documentElement.dataset.scheme = now;
      document.body.dataset.agThemeMode = now;
      return [now, now, now === "dark" ? "Light" : "Dark", clicks ? now : chosen || SAME()];
    },

    page: function (path, search) {
      const name = (path || "").replace(/^\/+|\/+$/g, "");
      const page = PAGES.includes(name) ? name : "result";
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
      const asked = new URLSearchParams(search || "");
      ["from", "devices", "batch"].forEach((own) => asked.delete(own)); // the form's
      const query = asked.toString().replace(/%2C/g, ",");
      return [page, window.innerWidth < 700, ...PAGES.map((one) => "/" + one + (query ? "?" + query : ""))];
    },
  };
  ["pointerdown", "keydown"].forEach((name) => {
    document.addEventListener(name, () => { window.tensoropt.touched = true; }, { capture: true, once: true });
  });
})();
