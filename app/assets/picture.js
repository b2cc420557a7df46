// The graph on the plan page: zoom by buttons, search, tooltips. The wheel stays the page's.
(function () {
  window.dash_clientside = window.dash_clientside || {};
  const SAME = () => window.dash_clientside.no_update;
  const drawn = () => { const at = document.getElementById("plan-picture"); return at && at._cyreg && at._cyreg.cy; };
  const STEP = 1.3;
  const LEAST = 0.92; // names of 12 px then have 11
  const MOST = 1.25;

  // At first all of it if it can be read, otherwise its beginning.
  function first(cy) {
    cy.resize(); // its place may have another height
    cy.fit(undefined, 12);
    const level = Math.min(Math.max(cy.zoom(), LEAST), MOST);
    if (level === cy.zoom()) return;
    cy.zoom(level);
    cy.center();
    const box = cy.elements().renderedBoundingBox({ includeLabels: false });
    cy.panBy({ x: Math.max(12 - box.x1, 0), y: Math.max(12 - box.y1, 0) });
  }

  window.dash_clientside.picture = {
    zoom: function () {
      const cy = drawn();
      const fired = window.dash_clientside.callback_context.triggered.map((t) => t.prop_id.split(".")[0]);
      if (!cy) return SAME();
      const middle = { x: cy.width() / 2, y: cy.height() / 2 };
      if (fired.includes("picture-fit")) cy.fit(undefined, 12);
      if (fired.includes("picture-in")) cy.zoom({ level: cy.zoom() * STEP, renderedPosition: middle });
      if (fired.includes("picture-out")) cy.zoom({ level: cy.zoom() / STEP, renderedPosition: middle });
      return SAME();
    },

    first: function () {
      // Behind the layout, which follows the elements.
      setTimeout(() => { const cy = drawn(); if (cy && cy.nodes().length) first(cy); }, 50);
      return SAME();
    },

    find: function (text) {
      const cy = drawn();
      if (!cy) return SAME();
      const wanted = (text || "").trim().toLowerCase();
      cy.nodes().removeClass("found");
      if (!wanted) return "";
      const hits = cy.nodes().filter((n) =>
        [n.id(), n.data("label"), n.data("axes")].concat(n.data("groups") || [])
          .some((s) => String(s).toLowerCase().includes(wanted)));
      hits.addClass("found");
      return hits.length + (hits.length === 1 ? " box" : " boxes");
    },

    tip: function (node, edge) {
      const at = document.getElementById("picture-tip");
      const over = node || edge;
      if (!at) return SAME();
      at.hidden = !over || !over.tip;
      if (!at.hidden) at.textContent = over.tip.join("\n");
      return SAME();
    },
  };
})();
