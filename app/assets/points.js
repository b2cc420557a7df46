// The table of points: columns become rows here, and the selected one is scrolled to.
(function () {
  const floats = (text) => new Float32Array(Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer);

  window.dash_clientside = window.dash_clientside || {};
  window.dash_clientside.points = {
    // A row's id is its number among the exploration's points.
    rows: function (columns) {
      if (!columns) return [[], null];
      const names = Object.keys(columns);
      const values = names.map((name) => {
        const { floats: packed, words, at } = columns[name];
        return packed === undefined ? at.map((place) => words[place]) : floats(packed);
      });
      const rows = Array.from(values[0], (_, i) => {
        const row = { id: String(i) };
        names.forEach((name, k) => {
          const value = values[k][i];
          row[name] = Number.isNaN(value) ? null : value;
        });
        return row;
      });
      return [rows, { of: Date.now(), count: rows.length }];
    },

    select: function (selection, rows, filters, view) {
      const same = window.dash_clientside.no_update;
      if (!view || view.point === null || view.point === undefined) return [same, same];
      const id = String(view.point);
      return [{ ids: [id] }, { rowId: id, rowPosition: "middle" }];
    },
  };
})();
