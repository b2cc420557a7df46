// Enter or space on a row of the points' table selects it, as a click does.
var dagfuncs = (window.dashAgGridFunctions = window.dashAgGridFunctions || {});
dagfuncs.chooseRow = function (params, setEventData) {
  const key = params.event && params.event.key;
  if (key === "Enter" || key === " ") setEventData({ row: params.node.id, at: Date.now() });
};
