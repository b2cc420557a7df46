"""Colours as eyes see them: contrast after WCAG, distances after CIE."""

from __future__ import annotations

import numpy as np

XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def linear(colour: str) -> np.ndarray:
    """``#rrggbb`` as linear RGB, (3,)."""
    channels = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def contrast(a: str, b: str) -> float:
    """WCAG 2.2, relative luminance."""
    light, dark = sorted((float(XYZ[1] @ linear(c)) for c in (a, b)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def lab(rgb: np.ndarray) -> np.ndarray:
    """CIE L*a*b* of linear RGB under D65."""
    xyz = XYZ @ np.clip(rgb, 0, 1) / np.array([0.9505, 1.0, 1.089])
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


PALE = """() => {
  const rgba = (text) => (c => [...c.slice(0, 3), c[3] ?? 1])(text.match(/[\\d.]+/g).map(Number));
  const over = (top, below) => [0, 1, 2].map(i => top[i] * top[3] + below[i] * (1 - top[3])).concat(1);
  const ground = (e) => {
    const layers = [];
    for (; e; e = e.parentElement) {
      const style = getComputedStyle(e), colour = rgba(style.backgroundColor);
      if (style.backgroundImage !== 'none') return null;
      if (colour[3]) layers.push(colour);
      if (colour[3] === 1) break;
    }
    return layers.reduceRight((below, top) => over(top, below), [255, 255, 255, 1]);
  };
  const light = (c) => [0.2126, 0.7152, 0.0722].reduce((sum, w, i) => {
    const v = c[i] / 255; return sum + w * (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4); }, 0);
  const faults = [];
  for (const e of document.querySelectorAll('body *')) {
    const said = [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
    if (!said || !e.checkVisibility({visibilityProperty: true, opacityProperty: true})) continue;
    if (e.closest('svg, canvas, .unseen, .skip, [disabled], [data-disabled], script, style')) continue;
    const below = ground(e);
    if (!below) continue;
    const style = getComputedStyle(e), ink = over(rgba(style.color), below);
    const [a, b] = [light(ink), light(below)].sort((x, y) => y - x), ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) faults.push(`${ratio.toFixed(2)} ${e.className} ${e.textContent.trim().slice(0, 30)}`);
  }
  return faults;
}"""
"""Text whose contrast with what it stands on is below WCAG AA's 4.5:1, as the browser draws it."""
