// Says why a file is refused: Dash's upload drops files of another kind or size without a word. The rules are data
// attributes of the drop zone.
(function () {
  const size = (bytes) => {
    if (bytes < 2 ** 13) return `${bytes.toLocaleString("en")} bytes`;
    if (bytes < 2 ** 20) return `${Math.round(bytes / 2 ** 10).toLocaleString("en")} KiB`;
    return `${Math.round(bytes / 2 ** 20).toLocaleString("en")} MiB`;
  };

  function refusal(file, rule) {
    const endings = rule.endings.split(","), most = Number(rule.mostBytes);
    if (!endings.some((ending) => file.name.toLowerCase().endsWith(ending))) {
      return `cannot be uploaded: choose a file that ends in ${endings.join(", ")}`;
    }
    if (file.size > most) {
      return `cannot be uploaded: it has ${size(file.size)}, the limit is ${size(most)}. `
        + `${rule.larger} for larger files.`;
    }
    return file.size ? "" : `is empty; ${rule.remedy}`;
  }

  function look(event) {
    const place = event.target.closest && event.target.closest("[data-most-bytes]");
    const files = (event.dataTransfer && event.dataTransfer.files) || event.target.files;
    if (!place || !files || !files.length) return;
    const rule = place.dataset;
    let why = "";
    if (files.length > 1) why = "One file at a time: drop a single one.";
    else {
      const said = refusal(files[0], rule);
      if (said) why = `'${files[0].name.slice(-80)}' ${said}`;
    }
    const note = why
      ? { props: { children: why, className: "note note-error", role: "alert" }, type: "Div", namespace: "dash_html_components" }
      : null;
    window.dash_clientside.set_props(rule.said, { children: note });
  }
  // The field that the keyboard reaches has no name of its own.
  function name() {
    const fields = [...document.querySelectorAll("[data-most-bytes] input[type=file]")];
    fields.forEach((field) => {
      const place = field.closest("[data-most-bytes]");
      if (!field.hasAttribute("aria-label")) field.setAttribute("aria-label", place.innerText.trim());
    });
  }
  window.setInterval(name, 1000); // pages come later

  document.addEventListener("change", look, true);
  document.addEventListener("drop", look, true);
})();
