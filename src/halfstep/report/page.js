"use strict";
(() => {
  const plots = JSON.parse(document.getElementById("plots").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  // Where a finger moves the page, dragging must not zoom a plot.
  const touch = matchMedia("(pointer: coarse)");

  // Plots name their colours as CSS variables; plotly needs the values, which depend on the colour scheme.
  const coloured = (value, key, style) => {
    if (Array.isArray(value)) return value.map((one) => coloured(one, key, style));
    if (value !== null && typeof value === "object")
      return Object.fromEntries(Object.entries(value).map(([name, one]) => [name, coloured(one, name, style)]));
    const variable = /color$/.test(key) && typeof value === "string" && /^var\((--[\w-]+)\)$/.exec(value);
    return variable ? style.getPropertyValue(variable[1]).trim() : value;
  };

  const draw = () => {
    const style = getComputedStyle(document.documentElement);
    plots.forEach((plot, place) => {
      const { data, layout } = coloured(plot, "", style);
      layout.font.family = getComputedStyle(document.body).fontFamily;
      layout.dragmode = touch.matches ? false : "zoom";
      Plotly.react(`figure-${place}`, data, layout, {
        responsive: true,
        displaylogo: false,
        displayModeBar: touch.matches ? false : "hover",
        // The whole list, since plotly's own has a button that uploads the data, and a newer plotly may bring others.
        modeBarButtons: [["toImage"], ["zoom2d", "pan2d"], ["resetScale2d"]],
        showSendToCloud: false,
        plotlyServerURL: "",
        toImageButtonOptions: { format: "svg" },
      });
    });
  };

  draw();

  // Timelines show the same steps: what is done to the axis of one is done to all.
  const linked = plots.flatMap((plot, place) => (plot.linked ? [document.getElementById(`figure-${place}`)] : []));
  const reach = (figure) => figure.layout.xaxis.range.map(Number);
  for (const figure of linked)
    figure.on("plotly_relayout", () => {
      const [first, last] = reach(figure);
      for (const other of linked) {
        const [start, end] = reach(other);
        if (start !== first || end !== last) Plotly.relayout(other, { "xaxis.range": [first, last] });
      }
    });
  dark.addEventListener("change", draw);
  touch.addEventListener("change", draw);
})();
