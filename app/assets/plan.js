// The tables of the plan page: their searches, and the way from an owner of memory to its operator.
(function () {
  window.dash_clientside = window.dash_clientside || {};

  window.dash_clientside.plan = {
    filter: function (text, options) {
      return { ...options, quickFilterText: String(text || "").slice(0, 80) };
    },

    follow: function (selected, rows) {
      const group = selected && selected.length ? selected[0].group : "";
      const same = window.dash_clientside.no_update;
      if (!group || !(rows || []).some((row) => row.group === group)) return [same, same];
      const table = document.getElementById("operators");
      if (table) table.scrollIntoView({ block: "center", behavior: "auto" });
      return [{ ids: [group] }, { rowId: group }];
    },
  };
})();
