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
    // Of what the filters keep: the points that have a name and the selected one, or all where they are asked for or
    // filtered.
    rows: function (columns, clicks, view) {
      const same = window.dash_clientside.no_update;
      if (!columns || !view) return [[], null, same, same];
      const news = known.columns !== columns;
      if (news) known = { columns, rows: unpacked(columns) };
      const { mesh, micro, devices, marks } = view;
      const asked = (clicks || 0) % 2 === 1;
      const all = asked || Boolean(mesh || micro || devices);
      const now = JSON.stringify([all, all ? -1 : view.point, mesh, micro, devices, marks]);
      if (!news && now === shown) return [same, same, same, same];
      shown = now;
      const kept = (row) => (!mesh || row.mesh === mesh) && (!micro || String(row.micro) === micro)
        && (!devices || String(row.devices) === devices) && (marks || row.point !== null);
      const rows = known.rows.filter((row, i) => kept(row) && (all || row.few || i === view.point));
      const points = known.rows.filter((row) => row.point !== null).length;
      const few = known.rows.filter((row) => row.few).length;
      const words = asked ? few + " notable" : "all " + points.toLocaleString("en");
      const needed = few < known.rows.length && !(mesh || micro || devices);
      return [rows, { of: Date.now(), count: rows.length }, words, needed ? {} : { display: "none" }];
    },

    select: function (selection, rows, view) {
      const same = window.dash_clientside.no_update;
      if (!view || view.point === null || view.point === undefined) return [same, same];
      const id = String(view.point);
      return [{ ids: [id] }, { rowId: id, rowPosition: "middle" }];
    },
  };
})();
