// Why a file is not taken: Dash's upload drops files of another kind or size without a word.
(function () {
  const refusal = (file, most) => {
    if (!file.name.toLowerCase().endsWith(".onnx")) return "is not taken: only files that end in .onnx are";
    if (file.size > most) {
      return `is not taken: it has ${size(file.size)}, at most ${size(most)} are taken. `
        + "Use the command line for larger files.";
    }
    return file.size ? "" : "is empty; export the model again";
  };
  const size = (bytes) => (bytes < 2 ** 20 ? `${bytes.toLocaleString("en")} bytes` : `${Math.round(bytes / 2 ** 20)} MiB`);

  function look(event) {
    const place = event.target.closest && event.target.closest("#upload-place");
    const files = (event.dataTransfer && event.dataTransfer.files) || event.target.files;
    if (!place || !files || !files.length) return;
    let why = "";
    if (files.length > 1) why = "One file at a time: drop a single ONNX file.";
    else {
      const said = refusal(files[0], Number(place.dataset.mostBytes));
      if (said) why = `'${files[0].name.slice(-80)}' ${said}`;
    }
    const note = why
      ? { props: { children: why, className: "note note-error", role: "alert" }, type: "Div", namespace: "dash_html_components" }
      : null;
    window.dash_clientside.set_props("upload-said", { children: note });
  }
  document.addEventListener("change", look, true);
  document.addEventListener("drop", look, true);
})();
