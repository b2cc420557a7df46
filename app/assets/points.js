// The table of points: columns become rows here, a few of them or all, and the selected one is scrolled to.
(function () {
  const floats = (text) => new Float32Array(Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer);
  let known = { columns: null, rows: [] };
  let shown = "";

  // A row's id is its number among the exploration's points.
  function unpacked(columns) {
    const names = Object.keys(columns);
    const values = names.map((name) => {
      const { floats: packed, words, at } = columns[name];
      return packed === undefined ? at.map((place) => words[place]) : floats(packed);
    });
    return Array.from(values[0], (_, i) => {
      const row = { id: String(i) };
      names.forEach((name, k) => {
        const value = values[k][i];
        row[name] = Number.isNaN(value) ? null : value;
      });
      return row;
    });
  }

  window.dash_clientside = window.dash_clientside || {};
  window.dash_clientside.points = {
    // The points that have a name and the selected one; all where they are asked for, or are filtered.
    rows: function (columns, clicks, filters, selection, view) {
      const same = window.dash_clientside.no_update;
      if (!columns) return [[], null, same, same];
      const news = known.columns !== columns;
      if (news) known = { columns, rows: unpacked(columns) };
      const asked = (clicks || 0) % 2 === 1;
      const all = asked || ["mesh", "micro", "devices"].some((name) => name in (filters || {}));
      const at = all || !view ? -1 : view.point;
      const now = all ? "all" : String(at);
      if (!news && now === shown) return [same, same, same, same];
      shown = now;
      const rows = all ? known.rows : known.rows.filter((row, i) => row.few || i === at);
      const points = known.rows.filter((row) => row.point !== null).length;
      const few = known.rows.filter((row) => row.few).length;
      const words = asked ? few + " notable points" : "all " + points.toLocaleString("en") + " points";
      return [rows, { of: Date.now(), count: rows.length }, words, few < known.rows.length ? {} : { display: "none" }];
    },

    select: function (selection, rows, filters, view) {
      const same = window.dash_clientside.no_update;
      if (!view || view.point === null || view.point === undefined) return [same, same];
      const id = String(view.point);
      return [{ ids: [id] }, { rowId: id, rowPosition: "middle" }];
    },
  };
})();
